"""A handler for the worker that takes as much memory as it is told."""


def make_handler(options):
    def handle(item):
        try:
            return {"ok": len(bytearray(item["mb"] * 2**20)) > 0}
        except MemoryError:
            return {"ok": False}

    return handle
