"""Show a root in a browser: one self-contained page, written to a file or served on loopback.

    model       what the page shows of a root: steps, why they are kept, saves, goodput, lineage; from metadata only
    journal     what a root's journal tells of runs and saves, and the goodput
    tensors     one checkpoint in columns: tensors, shards, checksums, files, objects
    statistics  of a tensor's values, read by parts; imports torch
    page        puts document and assets together; assets/ has the page itself: HTML, CSS and JavaScript, no library
    server      serves the same page live, read-only (starlette and uvicorn, the extra ``view``)

Torch-free but for `statistics`.
"""
