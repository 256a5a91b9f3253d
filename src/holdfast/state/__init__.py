"""Model, optimizer, scheduler, dataloader, RNG → named tensors and objects, and back.

tree           `StateTree`: walks the user's state, remembers what it found, plans loads
entries        what is found: `TensorEntry`, `ObjectEntry`, `Collected`; `local_tensor`
structure      found → `Structure`, the input of planning
flatten        nested values ↔ named leaves, by stock DCP's rules
modules, optimizers, values, rng, per_rank         one kind of thing each
loading, parts_loading, foreign                    what goes where on load; other writers' names
"""
