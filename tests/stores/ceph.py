"""Ceph's RADOS gateway with one monitor and one BlueStore OSD, all on loopback and below one directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path

from servers import KEY, SECRET, S3Server, free_ports

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool")
CONFIG = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon data avail crit = 1
mon osd nearfull ratio = .95
mon osd backfillfull ratio = .96
mon osd full ratio = .97
run dir = {directory}
admin socket = {directory}/$name.sock
log file = {directory}/$name.log
log to stderr = false
mon cluster log file = {directory}/cluster.log
pid file =
crash dir = {directory}
[mon.a]
mon data = {directory}/mon
[osd.0]
osd data = {directory}/osd
osd objectstore = bluestore
bluestore block size = 21474836480
osd memory target = 1073741824
[client.rgw]
rgw data = {directory}/rgw
ms mon client mode = crc
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw enable usage log = false
"""


class Ceph(S3Server):
    name = "ceph"
    refuses_damage = False  # as of 16.2 it doesn't know CRC64NVME, and ignores it
    compares_bare_tags = True

    @classmethod
    def missing(cls) -> str | None:
        absent = [program for program in PROGRAMS if shutil.which(program) is None]
        return f"no {', '.join(absent)} here: apt-get install radosgw ceph-mon ceph-osd" if absent else None

    @property
    def _config(self) -> Path:
        return self.directory / "ceph.conf"

    def launch(self) -> None:
        if not self._config.exists():
            self._make_cluster()
        else:
            self._start_cluster()
        self.run(*self._program("radosgw"), "-f", "-n", "client.rgw")

    def _program(self, name: str) -> tuple[str, ...]:
        return (shutil.which(name) or name, "-c", str(self._config))

    def _start_cluster(self) -> None:
        self.run(*self._program("ceph-mon"), "-i", "a", "-f")
        self.run(*self._program("ceph-osd"), "-i", "0", "-f")

    def _make_cluster(self) -> None:
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        (mon,) = free_ports(1)
        for name in ("mon", "osd", "rgw"):
            (self.directory / name).mkdir()
        text = CONFIG.format(fsid=fsid, mon=mon, port=self.port, directory=self.directory)
        self._config.write_text(text)
        monmap = str(self.directory / "monmap")
        address = f"[v2:127.0.0.1:{mon}]"
        self._do("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
        self._do(*self._program("ceph-mon"), "--mkfs", "-i", "a", "--monmap", monmap)
        self.run(*self._program("ceph-mon"), "-i", "a", "-f")
        self._do(*self._program("ceph"), "osd", "new", osd)
        self._do(*self._program("ceph-osd"), "-i", "0", "--mkfs", "--osd-uuid", osd)
        self.run(*self._program("ceph-osd"), "-i", "0", "-f")
        keys = ("--access-key", KEY, "--secret", SECRET, "--display-name", KEY)
        self._do(*self._program("radosgw-admin"), "-n", "client.rgw", "user", "create", "--uid", KEY, *keys)

    def remove(self, bucket: str) -> None:
        super().remove(bucket)
        self._do(*self._program("radosgw-admin"), "-n", "client.rgw", "gc", "process", "--include-all")

    def _do(self, *command: str) -> None:
        """Run a program to its end."""
        env = {**os.environ, "CEPH_CONF": str(self._config)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, cwd=self.directory, env=env)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.said()}"
