// The names of a checkpoint's tensors as a tree: parts between dots, chains of one child folded into one node.

class Names {
  constructor(columns) {
    this.columns = columns;
    this.root = { label: "", path: "", parent: null, children: new Map(), tensor: -1, nbytes: 0, count: 0, level: -1 };
    for (let at = 0; at < columns.size; at++) this.add(columns.names[at], at, columns.nbytes[at]);
  }

  add(name, tensor, nbytes) {
    let node = this.root;
    node.nbytes += nbytes;
    node.count += 1;
    for (const part of name.split(".")) {
      let next = node.children.get(part);
      if (!next) {
        next = { label: part, path: node.path ? `${node.path}.${part}` : part, parent: node, children: new Map(), tensor: -1, nbytes: 0, count: 0, open: false };
        node.children.set(part, next);
      }
      node = next;
      node.nbytes += nbytes;
      node.count += 1;
    }
    node.tensor = tensor;
  }

  /** The children of a node in natural order, each with what it alone leads to. */
  below(node) {
    node.sorted ??= [...node.children.values()].map((child) => {
      let end = child, label = child.label;
      while (end.tensor < 0 && end.children.size === 1) {
        [end] = end.children.values();
        label += `.${end.label}`;
      }
      end.shown = label;
      end.above = node;
      return end;
    }).sort((a, b) => natural(a.shown, b.shown));
    return node.sorted;
  }

  /** The rows in sight: nodes that are open show what is below them. */
  rows() {
    const found = [];
    const walk = (node, level) => {
      for (const child of this.below(node)) {
        child.level = level;
        found.push(child);
        if (child.open) walk(child, level + 1);
      }
    };
    walk(this.root, 0);
    return found;
  }

  /** Open everything that leads to a tensor, and return its node. */
  reveal(name) {
    let node = this.root;
    for (const part of name.split(".")) {
      node = node.children.get(part);
      if (!node) return null;
      if (node.children.size) node.open = true;
    }
    return node;
  }
}
