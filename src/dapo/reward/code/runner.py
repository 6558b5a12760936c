"""What runs inside the sandbox: it starts one program, and carries out calls into it for the trusted evaluator.

Consumes a job and then requests on a private socket, produces a status byte for each stage and one reply to each
request; waits for the next request and ends when the socket does. The program under test shares this process and can
do to it what it likes: all that comes out of here is a claim about what the program computes, and is treated so.

``sandbox.py`` sends this module as compiled code, together with ``values.py``, so that nothing is parsed here. A
start costs what the imports cost: hence no ``os``, no ``json``, no ``typing``. The code has a copy of the builtins of
its own, so that an honest program that replaces some of them does not break it.
"""

import marshal
import posix
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from dapo.reward.code.values import pack, to_json, unpack

READY, CONFINED, MALFORMED, LOADED, RAISED = b"R", b"C", b"S", b"L", b"E"

PRELUDE = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping "
    "NamedTuple NoReturn Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict UserDict defaultdict deque namedtuple",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile "
    "filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "math": "acos acosh asin atan atan2 ceil comb copysign cos degrees dist e exp factorial fabs floor fmod gcd hypot "
    "inf isclose isfinite isinf isnan isqrt lcm log log10 log2 modf nan perm pi prod radians sin sqrt tan tau trunc",
    "operator": "add and_ attrgetter concat contains eq floordiv ge gt itemgetter le lt methodcaller mod mul ne neg "
    "or_ sub truediv xor",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "random": "choice randint randrange shuffle",
    "re": "",
    "copy": "deepcopy",
    "datetime": "timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "statistics": "",
    "sys": "",
    "os": "",
    "time": "",
    "json": "",
}
"""The usual imports that programs in the LeetCode manner rely on: the names of each module, and the module itself."""

STANDARD: "dict[str, Callable[[Any], list[Any]]]" = {
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "collections.Counter": lambda value: [dict(value)],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
}
"""Types of the standard library that are copied as what they are: how, in arguments to make one again."""

_BASES = (
    (int, int.__pos__),
    (float, float.__pos__),
    (str, str.__str__),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (tuple, lambda value: tuple.__getitem__(value, slice(None))),
    (list, lambda value: list.__getitem__(value, slice(None))),
    (dict, lambda value: dict(dict.items(value))),
    (set, lambda value: {*set.__iter__(value)}),
    (frozenset, lambda value: frozenset({*frozenset.__iter__(value)})),
)


class _Forwarded(Exception):
    """An exception that a callback raised in the test, on its way back through the program."""


class _TestObject:
    """An object that the test has made, as the program sees it: its attributes and methods by name."""

    def __init__(self, link: "Link", number: int) -> None:
        self.__dict__["_origin"] = (link, number)

    def __getattr__(self, name: str) -> "Any":
        link, number = self.__dict__["_origin"]
        return link.call_back(number, ["get", name], {})

    def __setattr__(self, name: str, value: "Any") -> None:
        link, number = self.__dict__["_origin"]
        link.call_back(number, ["set", name, value], {})


class Link:
    """The socket to the evaluator, and the objects of the program that the test holds."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.namespace: dict[str, Any] = {}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id(); the object is kept in _objects, so the id stays its own

    def read(self) -> "Any":
        """The next message; None at the end."""
        header = self._read(4)
        return None if header is None else marshal.loads(self._read(int.from_bytes(header, "big")) or b"N")

    def _read(self, size: int) -> "bytes | None":
        parts = []
        while size:
            part = posix.read(self.fd, min(size, 1 << 20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, tree: "Any") -> None:
        body = to_json(tree).encode("ascii")
        view = memoryview(len(body).to_bytes(4, "big") + body)
        while view:
            view = view[posix.write(self.fd, view) :]

    def serve(self) -> "Any":
        """Carry out requests, until the end or until the reply to a callback comes."""
        while (message := self.read()) is not None:
            kind, *rest = message
            if kind == "returned":
                return unpack(rest[0], self._received)
            if kind == "raised":
                name, arguments = rest
                error = getattr(sys.modules["builtins"], name, None) or _Forwarded
                raise error(*unpack(arguments, self._received))
            try:
                reply = ["v", *self._carry_out(kind, *rest)]
            except BaseException as error:  # SystemExit too: it must not end the process before its tests
                reply = ["e", self._describe(error)]
            self.write(reply)
        posix._exit(0)

    def _carry_out(self, kind: str, target: "Any", arguments: "Any", keywords: "Any", track: bool) -> "list[Any]":
        """The value, and the arguments that have changed."""
        if kind == "names":
            found = [name for name in target if name in self.namespace]
            return [[[name, self.packed(self.namespace[name])] for name in found], []]
        if kind == "take":  # several items at once of an iterator, and how it went on
            return [self._take(self._objects[target], arguments), []]
        if kind == "base":  # the value of the builtin type that an object derives from
            return [self._base(self._objects[target]), []]
        arguments = unpack(arguments, self._received)
        keywords = dict(zip(keywords[::2], unpack(keywords[1::2], self._received), strict=True))
        function = self._objects[target] if type(target) is int else self._named(target)
        before = self._snapshot(arguments, keywords) if track else []
        value = self.packed(function(*arguments, **keywords))
        after = self._snapshot(arguments, keywords) if track else []
        return [value, [now for was, now in zip(before, after, strict=True) if was != now]]

    def _named(self, name: str) -> "Any":
        import _operator
        import builtins

        return getattr(_operator, name, None) or getattr(builtins, name)

    def _snapshot(self, arguments: "list[Any]", keywords: "dict[str, Any]") -> "list[Any]":
        places = [*enumerate(arguments), *keywords.items()]
        return [[key, self.packed(value)] for key, value in places if type(value) in (list, dict, set, bytearray)]

    def _take(self, iterator: "Any", count: int) -> "Any":
        items: list[Any] = []
        for _ in range(count):
            try:
                items.append(self.packed(next(iterator)))
            except StopIteration:
                return [items, None]
            except BaseException as error:
                return [items, self._describe(error)]
        return [items, True]

    def call_back(self, number: int, arguments: "list[Any]", keywords: "dict[str, Any]") -> "Any":
        self.write(["k", number, self.packed(arguments), [[name, self.packed(x)] for name, x in keywords.items()]])
        return self.serve()

    def packed(self, value: "Any") -> "Any":
        """The tree of a value, with objects that are not plain as references."""
        return pack(value, self._other)

    def _other(self, value: "Any") -> "Any":
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in STANDARD and getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind:
            return {"x": [name, self.packed(STANDARD[name](value))]}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        reference: list[Any] = [self._numbers[id(value)]]
        if isinstance(value, type) and issubclass(value, BaseException):
            reference.append([value.__qualname__, *_builtin_names(value)])
        return {"o": reference}

    def _base(self, value: "Any") -> "Any":
        for base, copy in _BASES:
            if issubclass(type(value), base):
                return [self.packed(copy(value))]
        return None

    def _describe(self, error: BaseException) -> "Any":
        try:
            arguments = self.packed([*error.args])
        except BaseException:
            arguments = []
        kind = type(error)
        self._other(kind)
        return [self._numbers[id(kind)], kind.__qualname__, _builtin_names(kind), arguments]

    def _received(self, tag: str, body: "Any") -> "Any":
        """What the test has sent that is not plain."""
        if tag == "o":
            return self._objects[body]
        if tag == "g":
            return getattr(sys.modules["builtins"], body)
        if tag == "x":
            module, _, name = body[0].partition(".")
            return getattr(__import__(module), name)(*body[1])
        if tag == "k":
            return lambda *arguments, **keywords: self.call_back(body, [*arguments], keywords)
        if tag == "y":
            return self._received_iterator(body)
        return _TestObject(self, body)

    def _received_iterator(self, number: int) -> "Any":
        while True:
            try:
                item = self.call_back(number, [], {})
            except StopIteration:
                return
            yield item


def _builtin_names(kind: type) -> "list[str]":
    return [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"]


def limit(limits: "dict[str, int]", user: "int | None") -> None:
    """Become ``user`` and let the limits come into force. The order matters: no limit may stop what comes after it."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 if memory runs out, this goes first
            file.write("1000")
    except OSError:
        pass
    if user is not None:
        posix.setgroups([])
        posix.setresgid(user, user, user)
        posix.setresuid(user, user, user)
        posix.stat(sys.path[1] + "/__future__.py")  # the standard library must be within the reach of that user
    for name, value in limits.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # programs that recurse deeply ask for more stack: what they get of it is bounded by their memory
        resource.setrlimit(which, (value, hard if name == "RLIMIT_STACK" else value))


def add_prelude(code: "Any", namespace: "dict[str, Any]") -> None:
    """Import what of ``PRELUDE`` the program mentions; it may define the same names itself."""
    wanted = set()
    codes = [code]
    while codes:
        part = codes.pop()
        wanted.update(part.co_names)
        codes += [constant for constant in part.co_consts if type(constant) is type(code)]
    for module, names in PRELUDE.items():
        found = wanted.intersection(names.split())
        if module in wanted or found:
            loaded = __import__(module)
            namespace.update({name: getattr(loaded, name) for name in found})
            if module != "bisect":  # there the function of that name is what programs mean
                namespace.setdefault(module, loaded)


def run_script(source: bytes, fd: int) -> None:
    """The program as if started by its name: ``__name__`` is ``"__main__"``, and its exit status is its own."""
    main = sys.modules["__main__"]
    main.__dict__.clear()
    main.__dict__.update({"__name__": "__main__", "__builtins__": sys.modules["builtins"], "__doc__": None})
    main.__dict__["__file__"] = "solution.py"
    try:
        exec(source, main.__dict__)
    except BaseException as error:
        if is_malformed(error):
            posix.write(fd, MALFORMED)
        raise


def run_module(source: bytes, link: Link, prelude: bool) -> None:
    """The program as an imported module, then calls into it."""
    module = type(sys)("solution")
    module.__file__ = "solution.py"
    sys.modules["solution"] = module
    program: Any = source
    try:
        if prelude:
            program = compile(source, "solution.py", "exec", dont_inherit=True)
            add_prelude(program, module.__dict__)
        exec(program, module.__dict__)
    except BaseException as error:
        posix.write(link.fd, MALFORMED if is_malformed(error) else RAISED)
        link.write(link._describe(error))
        posix._exit(1)
    posix.write(link.fd, LOADED)
    link.namespace = module.__dict__
    link.serve()


def is_malformed(error: BaseException) -> bool:
    """Whether a program does not compile: the error comes out of ``exec`` itself, before the first frame of the
    program. Nothing of it has run then, so this cannot be forged. (``compile`` first would be simpler, but its first
    use takes as long as a short program runs.)"""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def main(fd: int) -> None:
    null = posix.open("/dev/null", posix.O_RDWR)
    posix.dup2(null, 2)  # what bubblewrap had to say is said
    posix.close(null)
    link = Link(fd)
    posix.write(fd, READY)
    source, script, prelude, limits, user, paths = link.read()
    sys.path += paths
    limit(limits, user)
    for name in ("exit", "quit"):  # from the module site, which is not loaded
        setattr(sys.modules["builtins"], name, sys.exit)
    sys.argv[:] = ["solution.py"]
    sys.dont_write_bytecode = True
    posix.write(fd, CONFINED)
    if script:
        run_script(source, fd)
    else:
        run_module(source, link, prelude)
