// A table of any length: only the rows in sight are there. Sorts by its titles, moves by the keyboard, folds as a tree.

const ROW_HEIGHT = 32;

class Grid {
  /**
   * columns: [{title, width, end, value(row), cell(row)}], value to sort by; none to sort for a tree.
   * tree: {level(row), expanded(row) → true, false or null, toggle(row)}.
   */
  constructor({ caption, columns, height = 460, open = null, tree = null, sort = null, least = 640, key = null }) {
    Object.assign(this, { columns, open, tree, sort, key, caption });
    this.rows = [];
    this.active = -1;
    this.id = `grid-${++Grid.made}`;
    this.head = h("tr", { role: "row", "aria-rowindex": 1 }, columns.map((column, at) => this.title(column, at)));
    this.above = h("td", { class: "spacer", colspan: columns.length });
    this.below = h("td", { class: "spacer", colspan: columns.length });
    this.body = h("tbody", {});
    this.table = h("table", {
      role: tree ? "treegrid" : "grid", tabindex: "0", "aria-label": caption, style: { "min-width": `${least}px` },
      onkeydown: (event) => this.pressed(event), onclick: (event) => this.clicked(event),
    },
    h("caption", { class: "unseen" }, caption),
    h("colgroup", {}, columns.map((column) => h("col", { style: { width: column.width ?? "auto" } }))),
    h("thead", {}, this.head),
    h("tbody", { "aria-hidden": "true" }, h("tr", {}, this.above)),
    this.body,
    h("tbody", { "aria-hidden": "true" }, h("tr", {}, this.below)));
    this.box = h("div", { class: "scroll", style: { "max-height": `${height}px` }, onscroll: () => this.draw() }, this.table);
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  title(column, at) {
    const sortable = column.value && !this.tree;
    return h("th", { role: "columnheader", scope: "col", class: column.end ? "end" : null },
      sortable ? h("button", { type: "button", onclick: () => this.sortBy(at) }, column.title) : column.title);
  }

  /** Show ``rows``; the active one stays so if ``key`` finds it again. */
  show(rows) {
    const known = this.key && this.active >= 0 ? this.key(this.rows[this.active]) : null;
    this.rows = this.sort ? this.sorted(rows) : rows;
    this.active = known === null ? -1 : this.rows.findIndex((row) => this.key(row) === known);
    this.table.setAttribute("aria-rowcount", this.rows.length + 1);
    this.table.setAttribute("aria-label", `${this.caption}, ${plural(this.rows.length, "row")}`);
    this.drawn = null;
    this.draw();
  }

  sorted(rows) {
    const { at, down } = this.sort;
    const value = this.columns[at].value;
    const sign = down ? -1 : 1;
    this.head.childNodes.forEach((cell, index) => {
      if (index === at) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    const keyed = rows.map((row) => [value(row), row]);
    const absent = (key) => key === null || key === undefined || Number.isNaN(key);
    keyed.sort(([a], [b]) => {
      if (absent(a) || absent(b)) return absent(a) - absent(b);
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : natural(String(a), String(b)));
    });
    return keyed.map(([, row]) => row);
  }

  sortBy(at) {
    this.sort = { at, down: this.sort?.at === at ? !this.sort.down : Boolean(this.columns[at].end) };
    this.show(this.rows);
    announce(`sorted by ${this.columns[at].title}, ${this.sort.down ? "descending" : "ascending"}`);
  }

  draw() {
    const tall = this.box.clientHeight || 0;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW_HEIGHT) - 8);
    const last = Math.min(this.rows.length, first + Math.ceil(tall / ROW_HEIGHT) + 16);
    const drawn = `${first} ${last} ${this.active}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.above.style.height = `${first * ROW_HEIGHT}px`;
    this.below.style.height = `${(this.rows.length - last) * ROW_HEIGHT}px`;
    this.body.replaceChildren(...this.rows.slice(first, last).map((row, index) => this.row(row, first + index)));
    if (this.active >= first && this.active < last) this.table.setAttribute("aria-activedescendant", `${this.id}-${this.active}`);
    else this.table.removeAttribute("aria-activedescendant");
  }

  row(row, at) {
    const expanded = this.tree?.expanded(row) ?? null;
    return h("tr", {
      role: "row", id: `${this.id}-${at}`, class: at === this.active ? "row active" : "row", "data-at": at,
      "aria-rowindex": at + 2, "aria-selected": at === this.active ? "true" : "false",
      "aria-level": this.tree ? this.tree.level(row) + 1 : null,
      "aria-expanded": expanded === null ? null : String(expanded),
    }, this.columns.map((column) => {
      const cell = column.cell(row);
      return h("td", { role: "gridcell", class: column.end ? "end" : null, title: typeof cell === "string" ? cell : null }, cell);
    }));
  }

  clicked(event) {
    const line = event.target.closest("tr.row");
    if (!line) return;
    this.active = Number(line.dataset.at);
    this.draw();
    this.choose();
  }

  choose() {
    const row = this.rows[this.active];
    if (row === undefined) return;
    if (this.tree && this.tree.expanded(row) !== null) this.tree.toggle(row);
    else this.open?.(row);
  }

  move(to) {
    if (!this.rows.length) return;
    this.active = Math.max(0, Math.min(this.rows.length - 1, to));
    const top = this.active * ROW_HEIGHT, tall = this.box.clientHeight - 2 * ROW_HEIGHT;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top > this.box.scrollTop + tall) this.box.scrollTop = top - tall;
    this.drawn = null;
    this.draw();
  }

  pressed(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW_HEIGHT) - 2);
    const row = this.rows[this.active];
    const expanded = row === undefined || !this.tree ? null : this.tree.expanded(row);
    switch (event.key) {
      case "ArrowDown": this.move(this.active + 1); break;
      case "ArrowUp": this.move(this.active - 1); break;
      case "PageDown": this.move(this.active + page); break;
      case "PageUp": this.move(this.active - page); break;
      case "Home": this.move(0); break;
      case "End": this.move(this.rows.length - 1); break;
      case "Enter": case " ": this.choose(); break;
      case "ArrowRight": if (expanded !== false) return; this.tree.toggle(row); break;
      case "ArrowLeft": if (expanded !== true) return; this.tree.toggle(row); break;
      default: return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
}
Grid.made = 0;
