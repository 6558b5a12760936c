"""Programs in an operating-system sandbox: one bubblewrap start for each, and what is left of it is nothing.

Consumes a program's text, produces a :class:`Program`, a process whose pipes and socket the caller drives; waits for
the sandbox to stand. Inside, a program has namespaces of its own (user, process, network, IPC, host name, cgroup), no
effective capability, nothing of the user's environment, read-only Python and C libraries, a scratch folder in memory
and nothing else of the machine. Started as root, it runs as a user that owns nothing. Killing its first process kills
all of them.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import marshal
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from dapo.errors import RewardError
from dapo.reward.code import runner, values
from dapo.reward.code.program import Program, SandboxFailed
from dapo.reward.worker import adopt_orphans

INSTALL = "install bubblewrap (`apt-get install bubblewrap`, version 0.7 or newer)"
_PACKAGES = "/packages"
_NOBODY = 65534
_INNER_USER = 1000
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "PYTHONINTMAXSTRDIGITS": "0"}
"""Otherwise each thread reserves 64 MiB, and a handful of them would reach the memory limit. Integers may have any
number of digits, in the program (by ``-X``) and in the interpreters that it starts."""
_DEVICES = ("null", "zero", "urandom")
_STACK_BYTES = 120 * 2**20  # of the main thread; it grows when used. Deep but legal recursion needs it
_OPEN_FILES = 256
_BOOT = (
    "import marshal,posix,sys\n"
    "f,n,b=int(sys.argv[1]),int(sys.argv[2]),b''\n"
    "while len(b)<n:b+=posix.read(f,n-len(b)) or posix._exit(3)\n"
    "g={'__name__':'runner','__builtins__':dict(sys.modules['builtins'].__dict__)}\n"
    "for c in marshal.loads(b):exec(c,g)\n"
    "g['main'](f)\n"
)


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may take. ``memory`` counts for each process and for all of them together."""

    memory_bytes: int
    processes: int
    scratch_bytes: int


class Sandbox:
    """Starts programs. ``kind``: ``none`` runs them as plain processes with the rights of this one. ``packages``:
    installed ones that programs may import beside the standard library.
    Raises RewardError: a package is not installed."""

    def __init__(
        self, limits: SandboxLimits, kind: Literal["bubblewrap", "none"] = "bubblewrap", packages: Sequence[str] = ()
    ) -> None:
        self.limits = limits
        self._packages = tuple(folder for name in packages for folder in _package_folders(name))
        self._kind = kind
        self._python = str(Path(sys.executable).resolve())
        self._filter = make_filter()
        self._maps_users = kind == "bubblewrap" and os.geteuid() == 0

    def check(self) -> None:
        """Start one sandbox, to see that it can be done.
        Raises RewardError: bubblewrap is missing or not permitted; what would work."""
        if self._kind == "none":
            return
        if sys.platform != "linux" or shutil.which("bwrap") is None:
            raise RewardError(f"programs run in a sandbox, which needs `bwrap`: {INSTALL}, {_ALTERNATIVE}")
        adopt_orphans()
        first: SandboxFailed | None = None
        for maps_users in (True, False) if self._maps_users else (False,):
            self._maps_users = maps_users
            try:
                with self.start(b"", script=True):
                    return
            except SandboxFailed as error:
                first = first or error
        raise RewardError(
            f"the sandbox for programs does not start ({first}). bubblewrap 0.7 or newer is needed, and user "
            "namespaces must be permitted: sysctl kernel.unprivileged_userns_clone=1 and user.max_user_namespaces "
            "above 0, on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0; in a container, docker run "
            f"--security-opt seccomp=unconfined --security-opt systempaths=unconfined. {_ALTERNATIVE.capitalize()}"
        )

    @contextlib.contextmanager
    def start(self, source: bytes, *, script: bool, prelude: bool = False) -> Iterator[Program]:
        """A program that is about to be loaded. At the end of the block it is killed, with all that it started.

        Args:
            source: its text, in UTF-8 if it is text at all.
            script: run it from its top with pipes as standard input and output; else load it as a module, for calls.
            prelude: give a module the usual imports.

        Raises SandboxFailed: the sandbox does not start, for reasons that are not the program's.
        """
        with contextlib.ExitStack() as stack:
            folder = None
            if self._kind == "none":
                folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            program = self._spawn(script, folder)
            stack.callback(program.end)
            paths = sorted({_PACKAGES if folder is None else str(Path(one).parent) for one in self._packages})
            user = _INNER_USER if self._maps_users else None
            program.boot(_runner_code(), (source, script, prelude, self._rlimits(), user, paths))
            yield program

    def _rlimits(self) -> dict[str, int]:
        limits = {
            "RLIMIT_STACK": _STACK_BYTES,
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": _OPEN_FILES,
            "RLIMIT_FSIZE": self.limits.scratch_bytes,
            "RLIMIT_AS": self.limits.memory_bytes,
        }
        if self._kind == "bubblewrap":  # elsewhere all processes of the user would count
            limits["RLIMIT_NPROC"] = self.limits.processes
        return limits

    def _spawn(self, script: bool, folder: str | None) -> Program:
        ours, theirs = socket.socketpair()
        closing: list[int] = []
        inherited = [theirs.fileno()]
        options = ["-I", "-S", "-E", "-X", "utf8", "-X", "int_max_str_digits=0", "-c"]
        command = [self._python, *options, _BOOT, str(theirs.fileno()), str(len(_runner_code()))]
        info = block = None
        if self._kind == "bubblewrap":
            info, info_end = os.pipe()
            block_end, block = os.pipe()
            options = ["--info-fd", str(info_end)]
            inherited.append(info_end)
            closing += [info_end, block_end]
            if self._maps_users:
                options += ["--userns-block-fd", str(block_end)]
                inherited.append(block_end)
            if self._filter is not None:
                rules, rules_end = os.pipe()
                os.write(rules_end, self._filter)
                os.close(rules_end)
                options += ["--seccomp", str(rules)]
                inherited.append(rules)
                closing.append(rules)
            before = _arguments(self._python, self.limits.scratch_bytes, self._maps_users, self._packages)
            command = [*before, *options, "--", *command]
        pipe = subprocess.PIPE if script else subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd=folder or "/",
                pass_fds=inherited,
                start_new_session=folder is not None,
                bufsize=0,
            )
        except OSError as error:
            ours.close()
            closing += [end for end in (info, block) if end is not None]
            raise SandboxFailed(f"{command[0]}: {error}") from None
        finally:
            theirs.close()
            for end in closing:
                os.close(end)
        if process.stdin is not None:  # /dev/stdin is opened anew, by a user that does not own the pipe
            os.fchmod(process.stdin.fileno(), 0o666)
        program = Program(process, ours, own_group=folder is not None)
        if info is not None and block is not None:
            self._enter(program, info, block)
        return program

    def _enter(self, program: Program, info: int, block: int) -> None:
        """Learn which process is the first one inside, and map its users if that is ours to do."""
        try:
            text = b""
            while b"}" not in text and (part := os.read(info, 4096)):
                text += part
            if b"}" in text:
                first = json.loads(text)["child-pid"]
                program.first_inside(first)
                if self._maps_users:
                    users = f"0 0 1\n{_INNER_USER} {_NOBODY} 1\n"
                    for name in ("uid_map", "gid_map"):
                        Path(f"/proc/{first}/{name}").write_text(users)
                    os.write(block, b"1")
        except OSError as error:
            program.end()
            raise SandboxFailed(f"its users cannot be mapped: {error}") from None
        finally:
            os.close(info)
            os.close(block)


_ALTERNATIVE = (
    "or set `sandbox: none` if you trust every program (it runs them with your rights, and says so on every run)"
)


@cache
def _arguments(python: str, scratch_bytes: int, maps_users: bool, packages: tuple[str, ...]) -> list[str]:
    """The bubblewrap command in front of a program. ``maps_users``: who runs it will write the user maps."""
    namespaces = [f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts", "cgroup-try")]
    command = [shutil.which("bwrap") or "bwrap", *namespaces, "--die-with-parent", "--new-session"]
    command += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    if maps_users:  # the runner's first act is to become the inner user, which takes these two away again
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--uid", str(_INNER_USER), "--gid", str(_INNER_USER)]
    bound = [path for path in _SYSTEM if Path(path).exists() and not Path(path).is_symlink()] + _python_files(python)
    for folder in dict.fromkeys(("/dev", _PACKAGES, *(str(Path(path).parent) for path in bound))):
        command += ["--dir", folder]  # left to itself, bubblewrap makes them unreadable for all but its own user
    for path in bound:
        command += ["--ro-bind", path, path]
    for path in _SYSTEM:
        if Path(path).is_symlink():
            command += ["--symlink", str(Path(path).readlink()), path]
    for path in packages:
        command += ["--ro-bind", path, f"{_PACKAGES}/{Path(path).name}"]
    for name in _DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--symlink", "/tmp", "/dev/shm", "--symlink", "/proc/self/fd/0", "/dev/stdin", "--proc", "/proc"]
    # the root is a file system in memory too, and without a limit: it must not be written to
    command += ["--perms", "0777", "--size", str(scratch_bytes), "--tmpfs", "/tmp", "--remount-ro", "/"]
    return [*command, "--chdir", "/tmp"]


def _python_files(python: str) -> list[str]:
    """The folders of the interpreter and its standard library, as far as they are not the system's own. A virtual
    environment's packages are not among them, and those beside the standard library are not looked for."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = [python]
    for root in dict.fromkeys((sys.base_exec_prefix, sys.base_prefix)):
        if Path(root) == Path("/usr"):
            found.append(str(Path(root, sys.platlibdir, version)))
        else:
            found = [path for path in found if not path.startswith(f"{root}/")] + [root]
    return [path for path in found if not path.startswith(("/usr/lib/", "/usr/lib32/", "/usr/lib64/"))]


def _package_folders(name: str) -> list[str]:
    """The folder of an installed package, and that of the libraries which wheels put beside it."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise RewardError(f"packages: {name!r} is no package that is installed beside this program: pip install {name}")
    folder = Path(spec.submodule_search_locations[0]).resolve()
    return [str(path) for path in (folder, folder.with_name(f"{name}.libs")) if path.is_dir()]


@cache
def _runner_code() -> bytes:
    """The runner as compiled code for this very interpreter, which is also the one inside."""
    modules = [Path(str(module.__file__)) for module in (values, runner)]
    return marshal.dumps(
        [compile(path.read_bytes(), path.name, "exec", dont_inherit=True, optimize=2) for path in modules]
    )


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
    """The system calls that a program may not make, as a filter for the kernel (a classic BPF program): an array of
    ``struct sock_filter`` for this kind of machine; None where none has been written.

    Namespaces hide the machine; this closes what they leave open: new user namespaces (in which a program would have
    every capability again), address families that no network namespace covers (vsock reaches the host of a virtual
    machine), and memory that no limit counts (memfd, System V shared memory and queues). A refused call fails with
    EPERM and the program goes on. Nothing else is filtered, so that honest programs see an ordinary system.
    """
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
