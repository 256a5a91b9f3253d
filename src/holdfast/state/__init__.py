"""Convert model, optimizer, scheduler, dataloader and RNG to named tensors and objects, and back.

tree                                        `StateTree`: walks the user's state, remembers what it found, plans loads
entries                                     results: `TensorEntry`, `ObjectEntry`, `Collected`; `local_tensor`
structure                                   collected entries → `Structure`, the input of planning
flatten                                     nested values ↔ named leaves, by stock DCP's rules; containers remembered
modules, optimizers, optimizer_views, rng   one kind of part each
shards, megatron, fsdp1, subclasses         tensors in parts, and those who make them
load_plan, restore_plan                     where stored values go on load; stock's names
"""
