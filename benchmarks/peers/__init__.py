"""The contenders: which module each is in, what it needs, what to know about it. Torch-free: the runner reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """How to start a contender.

    where: ``module:class`` below `benchmarks.peers`. asynchronous: the caller trains on while it saves. loads, parts:
    it takes part in loads, and in partial reads. apart: measured in a case of its own. shards: it knows how to save
    what several ranks share. keeps: memory, plans or processes, from one turn to the next, so that its first is not
    like the others. reshards: it loads with another number of ranks than it saved with. exports: it leaves Hugging Face
    weights, and does nothing else; named: which others can read. syncs: it brings weights to another process, and does
    nothing else; the table that it is in. store: it saves to object stores, and does nothing else. packages: what its
    own environment needs, None for the runner's; ``bare`` ones are installed without what they ask for (they'd pull
    another torch). says: printed below the report.
    """

    name: str
    label: str
    where: str
    asynchronous: bool = False
    loads: bool = True
    parts: bool = False
    reshards: bool = False
    saves: bool = True
    apart: bool = False
    shards: bool = True
    keeps: bool = True
    exports: bool = False
    named: bool = True
    syncs: str = ""
    store: bool = False
    bare: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    group: bool = False
    says: str = ""

    @property
    def own_environment(self) -> bool:
        return bool(self.bare or self.packages)

    @property
    def environment(self) -> str:
        return self.where.partition(":")[0] if self.own_environment else ""


def _export(name: str, label: str, kind: str, *, says: str, asynchronous: bool = False, named: bool = True) -> Peer:
    return Peer(
        name,
        label,
        f"exports_:{kind}",
        asynchronous=asynchronous,
        loads=False,
        saves=False,
        exports=True,
        named=named,
        says=says,
    )


def _sync(name: str, label: str, kind: str, table: str, *, says: str = "") -> Peer:
    return Peer(name, label, f"sync_:{kind}", loads=False, saves=False, syncs=table, says=says)


def _store(name: str, label: str, kind: str, *, says: str, group: bool = False, packages: tuple[str, ...] = ()) -> Peer:
    return Peer(
        name,
        label,
        f"stores_:{kind}",
        loads=False,
        saves=False,
        store=True,
        group=group,
        packages=packages,
        says=says,
    )


DELTA_SHARES = {"1": 0.01, "10": 0.1, "100": 1.0}
"""Of the bytes, changed before a version; by what its row of the table is called behind the contender's name."""

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "raw",
            "raw limit",
            "raw:Raw",
            parts=True,
            says="`O_DIRECT` from the state's own memory in two threads, one fsync; loads are `preadv` in two threads "
            "straight into the tensors. Nothing is named, hashed or published.",
        ),
        Peer(
            "holdfast",
            "**Holdfast**",
            "holdfast_:Lazy",
            asynchronous=True,
            parts=True,
            reshards=True,
            says="`CheckpointManager`, defaults (lazy staging, checksums, fsync, atomic publish). It is handed the "
            "module and the optimizer; peers are handed a ready dict of tensors.",
        ),
        Peer(
            "holdfast-eager",
            "Holdfast, eager",
            "holdfast_:Eager",
            asynchronous=True,
            loads=False,
            apart=True,
            says='the same with `staging="eager"`: all is copied before `save` returns.',
        ),
        Peer(
            "holdfast-unverified",
            "Holdfast, `verify=False`",
            "holdfast_:Unverified",
            saves=False,
            says="loads without matching checksums, to see what matching them costs.",
        ),
        Peer(
            "dcp-save",
            "`dcp.save`",
            "dcp:Sync",
            keeps=False,
            reshards=True,
            group=True,
            parts=True,
            says="fsyncs by itself.",
        ),
        Peer(
            "dcp-thread",
            "`dcp.async_save`, thread",
            "dcp:Thread",
            asynchronous=True,
            loads=False,
            group=True,
            says="`AsyncCheckpointerType.THREAD` with one `DefaultStager` kept from save to save, and plans cached.",
        ),
        Peer(
            "dcp-process",
            "`dcp.async_save`, process",
            "dcp:Process",
            asynchronous=True,
            loads=False,
            group=True,
            says="`AsyncCheckpointerType.PROCESS` with one shared-memory `DefaultStager` kept from save to save, "
            "and plans cached.",
        ),
        Peer(
            "torch-checkpointing",
            "`torch_checkpointing`",
            "torch_checkpointing_:Managed",
            asynchronous=True,
            reshards=True,
            group=True,
            bare=("torch_checkpointing==0.1.1",),
            says="its manager with asynchronous staging and `lock()` before the update; `O_DIRECT` off, since its "
            "default fails on ext4 with EINVAL; it does not fsync: that is added within its time. On several "
            "ranks it is run without its resharder, which asks for CUDA when it saves: what two ranks saved, one can't "
            "load then.",
        ),
        Peer(
            "nvrx",
            "`nvidia-resiliency-ext`",
            "nvrx:Persistent",
            asynchronous=True,
            loads=False,
            group=True,
            bare=("nvidia-resiliency-ext==0.4.1", "nvidia-ml-py"),
            packages=("packaging", "psutil", "pyyaml", "defusedxml"),
            says="`AsyncCallsQueue` with its persistent worker and cached plans. It does not copy CPU tensors, so the "
            "state is cloned first, into shared memory that is kept: its only safe mode without a GPU. Its calls of "
            "`torch.cuda` are answered for the CPU.",
        ),
        Peer(
            "torchsnapshot",
            "`torchsnapshot`",
            "torchsnapshot_:Snapshots",
            shards=False,
            keeps=False,
            asynchronous=True,
            bare=("torchsnapshot==0.1.0",),
            packages=("PyYAML", "aiofiles", "aiohttp", "importlib-metadata", "nest-asyncio", "psutil"),
            says="`Snapshot.async_take`; it does not fsync: that is added within its time. It knows no DTensor, "
            "so it is not run on two ranks.",
        ),
        Peer(
            "torch-save",
            "`torch.save`",
            "files_:TorchSave",
            shards=False,
            keeps=False,
            says="one file a rank, then fsync; loaded with `mmap=True` and copied into the tensors.",
        ),
        Peer(
            "safetensors",
            "`safetensors`",
            "files_:SafeTensors",
            shards=False,
            keeps=False,
            parts=True,
            says="one file a rank, then fsync; loaded one tensor at a time and copied into the state.",
        ),
        _export(
            "raw-export",
            "raw limit",
            "Raw",
            named=False,
            says="as above, of as many bytes as the export has: what is measured of exports is against this.",
        ),
        _export(
            "holdfast-export",
            "**Holdfast**, in a manager",
            "Managed",
            asynchronous=True,
            says="`HFExport` with `every=1` and no checkpoint due: its memory is that of the capture, which a "
            "checkpoint of the same step shares, and of the export.",
        ),
        _export("holdfast-export-hf", "Holdfast, `export_hf`", "AtOnce", says="the same, waited for by its caller."),
        _export(
            "dcp-hf",
            "`HuggingFaceStorageWriter`",
            "Consolidated",
            says="`dcp.save` of the shards, cast before, with `save_distributed` and `enable_consolidation` by two "
            "threads on rank 0; what it puts together is fsynced within its time.",
        ),
        _export(
            "save-pretrained",
            "gather, `save_pretrained`",
            "Gathered",
            says="`get_model_state_dict` with `full_state_dict` and `cpu_offload`; cast and saved by rank 0, then "
            "fsynced.",
        ),
        _sync(
            "raw-broadcast",
            "`dist.broadcast`, gloo",
            "Broadcast",
            "sync-gloo",
            says="the limit of weight versions over gloo: as many bytes, 256 MiB at a time, between the same two "
            "processes, straight from and into the memory. Nothing is hashed, named or committed.",
        ),
        _sync(
            "holdfast-sync-gloo",
            "**Holdfast**, gloo",
            "OverGloo",
            "sync-gloo",
            says="`Publisher` and `Receiver`, defaults: every bucket is verified, the version goes to a shadow and is "
            "copied to the live tensors when all of it is right.",
        ),
        _sync(
            "holdfast-sync-gloo-streaming",
            "Holdfast, gloo, `streaming`",
            "OverGlooStreaming",
            "sync-gloo",
            says="the same straight into the live tensors, which are dirty meanwhile.",
        ),
        _sync(
            "raw-copy",
            "memcpy, two threads",
            "Copy",
            "sync-memory",
            says="the limit of weight versions through shared memory: one copy in warm memory.",
        ),
        _sync("holdfast-sync-memory", "**Holdfast**, shared memory", "ThroughMemory", "sync-memory"),
        _sync(
            "holdfast-sync-memory-streaming",
            "Holdfast, shared memory, `streaming`",
            "ThroughMemoryStreaming",
            "sync-memory",
        ),
        _sync("holdfast-sync-full", "Holdfast, gloo, all of it", "OverGloo", "sync-delta"),
        _sync(
            "holdfast-sync-delta",
            "Holdfast, gloo, `delta`",
            "OverGlooDelta",
            "sync-delta",
            says="whole tensors are changed, as many as make up that share of the bytes, the last one in part; the "
            "publisher finds them by checksums of extents of 1 MiB.",
        ),
        _store(
            "raw-store",
            "raw `obstore`",
            "Raw",
            says="the limit of stores: `obstore.put` of the state's memory as one object, in parts of 8 MiB, 8 at a "
            "time, CRC64NVME in place of signed payloads; `obstore.get_range` of 8 MiB by 16 threads, copied into the "
            "tensors. Nothing is named, hashed or committed.",
        ),
        _store(
            "holdfast-store",
            "**Holdfast**, `save` and `load`",
            "Blocking",
            says="`holdfast.save` and `holdfast.load` of a URL, defaults. What is uploaded is a copy of the state, "
            "made before, in an image in shared memory that is not among the memory shown. The race that proves a "
            "bucket's conditions, once a process and bucket, is part of the first save only.",
        ),
        _store(
            "boto3",
            "`boto3`",
            "Boto3",
            packages=("boto3",),
            says="`upload_fileobj` of the state's memory as one object and `download_fileobj` into it, with a "
            "`TransferConfig` of 8 MiB a part, 8 threads for uploads, 16 for downloads. Nothing is named or committed.",
        ),
        _store(
            "s3torchconnector",
            "`s3torchconnector`, DCP",
            "S3TorchConnector",
            group=True,
            packages=("s3torchconnector[dcp]==1.5.0",),
            says="`dcp.save` and `dcp.load` with its `S3StorageWriter` and `S3StorageReader`, defaults (one file, "
            "parts of 8 MiB), path-style addresses.",
        ),
        _store(
            "dcp-fsspec",
            "DCP, `fsspec`",
            "Fsspec",
            group=True,
            packages=("s3fs==2026.9.0",),
            says="`dcp.save` and `dcp.load` with torch's `FsspecWriter` and `FsspecReader` over s3fs, blocks of 8 MiB, "
            "8 at a time.",
        ),
    )
}
