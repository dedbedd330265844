"""Memory with an address: what engine blocks and staging are to the native core."""

import ctypes
import mmap


class Buffer:
    """Page-aligned bytes, zero at first. `view`: the content; `address`: where it starts."""

    def __init__(self, length_bytes: int):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, max(length_bytes, 1), flags)
        self.view = memoryview(self._map)[:length_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def of(cls, content: bytes) -> "Buffer":
        buffer = cls(len(content))
        buffer.view[:] = content
        return buffer
