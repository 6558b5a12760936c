"""The system calls that a sandboxed program may not make, as a filter for the kernel (a classic BPF program).

Namespaces hide the machine; this closes what they leave open: new user namespaces (in which a program would have
every capability again), address families that no network namespace covers (vsock reaches the host of a virtual
machine), and memory that no limit counts (memfd, System V shared memory and queues). A refused call fails with EPERM
and the program goes on. Nothing else is filtered, so that honest programs see an ordinary system.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD_WORD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data (little-endian machines)

_AF_ALLOWED = (1, 2, 10)  # unix and the two internet families, which are cut off by the network namespace
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: user, pid, net, ipc, uts, cgroup and mount
_X32 = 0x3FFFFFFF  # on x86-64, numbers above belong to another interface to the same calls

_COMMON = (*range(425, 434), 435, 442, 447)  # io_uring, the new mount calls, clone3, mount_setattr, memfd_secret
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {"clone": 56, "socket": 41},
        # unshare setns mount umount2 pivot_root memfd_create shmget semget msgget add_key request_key keyctl bpf
        # perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev
        (272, 308, 165, 166, 155, 319, 29, 64, 68, 248, 249, 250, 321, 298, 323, 101, 310, 311),
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "socket": 198},
        (97, 268, 40, 39, 41, 279, 194, 190, 186, 217, 218, 219, 280, 241, 282, 117, 270, 271),
    ),
}
_CLONE3 = 435


def make_filter(machine: str = platform.machine()) -> bytes | None:
    """The filter for this kind of machine, an array of ``struct sock_filter``; None where none has been written."""
    if machine not in _MACHINES:
        return None
    arch, numbers, refused = _MACHINES[machine]
    deny, allow = _step(_RETURN, _ERRNO | errno.EPERM), _step(_RETURN, _ALLOW)
    steps = [_step(_LOAD_WORD, _ARCH_AT), _step(_JUMP_EQUAL, arch, 1, 0), deny, _step(_LOAD_WORD, _NUMBER_AT)]
    steps += [_step(_JUMP_ABOVE, _X32, 0, 1), deny]
    # the C library falls back to clone, whose flags can be seen from here, if this one does not exist
    steps += [_step(_JUMP_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    for number in sorted({*refused, *_COMMON} - {_CLONE3}):
        steps += [_step(_JUMP_EQUAL, number, 0, 1), deny]
    steps += [
        _step(_JUMP_EQUAL, numbers["clone"], 0, 4),
        _step(_LOAD_WORD, _FIRST_ARGUMENT_AT),
        _step(_JUMP_BITS, _NEW_NAMESPACES, 0, 1),
        deny,
        allow,
        _step(_JUMP_EQUAL, numbers["socket"], 0, 2 + len(_AF_ALLOWED)),
        _step(_LOAD_WORD, _FIRST_ARGUMENT_AT),
    ]
    steps += [_step(_JUMP_EQUAL, family, len(_AF_ALLOWED) - k, 0) for k, family in enumerate(_AF_ALLOWED)]
    return b"".join([*steps, deny, allow])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
