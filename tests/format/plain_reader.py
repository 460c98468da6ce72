"""A reader of Flowstone checkpoints, written from docs/FORMAT.md alone. It checks no digests."""

import json
import struct

import numpy as np

ODD_BYTES = {"bfloat16": 2, "bits16": 2, "complex32": 4}  # of an element; 1 in the other types that numpy lacks
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def read(checkpoint):
    """Tensors by name, replicated and per-rank objects. Types that numpy lacks come as bytes, one more dimension."""
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    if manifest["flowstone"] != 1 or not {*manifest["critical"]} <= {"delta", "copies", "codec.planes", "codec.cast"}:
        raise ValueError(f"cannot read version {manifest['flowstone']} with {manifest['critical']}")
    tensors = read_tensors(checkpoint, manifest, "chunk" if manifest["critical"] else "piece")
    nodes = json.loads((checkpoint / "objects.json").read_bytes())
    return tensors, *({name: value(v, tensors) for name, v in nodes[k].items()} for k in ("replicated", "per_rank"))


def read_tensors(checkpoint, manifest, table):
    data = (checkpoint / manifest["index"]["name"]).read_bytes()
    start = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:start])
    dtypes = header.pop("__metadata__")["dtypes"].split()
    column, chunk, files = {}, 0, [checkpoint / segment["name"] for segment in manifest["segments"]]
    for name, entry in header.items():
        begin, count = start + entry["data_offsets"][0], entry["shape"][0]
        column[name] = np.frombuffer(data, f"<u{int(entry['dtype'][1:]) // 8}", count, begin).tolist()
    lengths, boxes, arrays = iter(column["tensor.shape"]), iter(column["piece.box"]), []
    for dtype, ndim in zip(column["tensor.dtype"], column["tensor.ndim"], strict=True):
        kind, raw = dtypes[dtype], [*(next(lengths) for _ in range(ndim)), ODD_BYTES.get(dtypes[dtype], 1)]
        arrays.append(np.empty(raw[:-1], kind) if kind in np.sctypeDict else np.empty(raw, "u1"))
    sizes, places = column["piece.bytes"], [column[f"{table}.{name}"] for name in ("segment", "offset", "bytes")]
    if table == "chunk":
        sizes = [min(2**20, size - offset) for size in sizes for offset in range(0, size, 2**20)]

    def chunk_data(number, kind):
        file, position, count = (place[number] for place in places)
        codec = column["chunk.codec"][number] if table == "chunk" else 0
        if codec == 4:
            singles = [chunk_data(position + half, "float32") for half in range(1 + (sizes[number] > 2**19))]
            return rounded(b"".join(singles), kind)
        stored = bytes(np.fromfile(files[file], "u1", count, offset=position))
        return planes(stored, sizes[number]) if codec else stored

    for piece, row in enumerate(column["piece.tensor"]):
        size, first = column["piece.bytes"][piece], chunk
        chunk = first + (-(-size // 2**20) if table == "chunk" else 1)
        offset, shape = ([next(boxes) for _ in range(column["tensor.ndim"][row])] for _ in range(2))
        kind = dtypes[column["tensor.dtype"][row]]
        raw = b"".join(chunk_data(number, kind) for number in range(first, chunk))
        box = tuple(slice(begin, begin + n) for begin, n in zip(offset, shape, strict=True))
        arrays[row][box] = np.frombuffer(raw, arrays[row].dtype).reshape(arrays[row][box].shape)
    arrays += [arrays[row] for row in column["alias.tensor"]]
    return dict(zip(texts(column, "tensor") + texts(column, "alias"), arrays, strict=True))


def rounded(singles, kind):
    """The data of a chunk with codec 4: to nearest, ties to even."""
    if kind == "float16":
        return np.frombuffer(singles, "<f4").astype("<f2").tobytes()
    bits = np.frombuffer(singles, "<u4").astype("u8")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def planes(stored, data_bytes):
    """The data of a chunk with codec 1."""
    width = stored[0]
    modes, position, count = stored[1 : 1 + width], 1 + width, data_bytes // width
    data = np.empty((count, width), "u1")
    for mode, plane in sorted((mode > 0, plane) for plane, mode in enumerate(modes)):
        size = count if not mode else 1 if modes[plane] == 1 else 4 + struct.unpack_from("<I", stored, position)[0]
        body = stored[position : position + size]
        data[:, plane] = coded_plane(body[4:], count) if modes[plane] == 2 else np.frombuffer(body, "u1")
        position += size
    return data.tobytes()


def coded_plane(coded, count):
    """Interleaved rANS, 32 symbols at a time."""
    state = np.frombuffer(coded, "<u4", 32).astype("i8")
    bytes_ = np.flatnonzero(np.unpackbits(np.frombuffer(coded, "u1", 32, 128), bitorder="little"))
    f = np.frombuffer(coded, "<u2", len(bytes_), 160).astype("i8")
    words, offset = np.frombuffer(coded, "<u2", offset=160 + 2 * len(bytes_)), 0
    slot_of, c, result = np.repeat(np.arange(len(f)), f), np.cumsum(f) - f, np.empty(count, "u1")
    for i in range(0, count, 32):
        x = state[: min(32, count - i)]  # a view
        k = slot_of[x % 4096]
        result[i : i + 32] = bytes_[k]
        x[:] = f[k] * (x // 4096) + x % 4096 - c[k]
        low = np.flatnonzero(x < 2**15)
        x[low] = x[low] * 2**16 + words[offset : offset + len(low)]
        offset += len(low)
    return result


def texts(column, table: str):
    text = iter(column[f"{table}.name"])
    return [bytes(next(text) for _ in range(size)).decode() for size in column[f"{table}.name_bytes"]]


def unbase64(text: str) -> bytes:
    bits = "".join(f"{BASE64.index(c):06b}" for c in text.rstrip("="))
    return int(bits[: len(bits) // 8 * 8] or "0", 2).to_bytes(len(bits) // 8)


def value(node, tensors):
    """An object's value; what is no built-in type comes as the next best: OrderedDict as dict, constants as text."""
    if isinstance(node, list):
        return [value(item, tensors) for item in node]
    tag = next((key for key in node if key[:1] == "$"), None) if isinstance(node, dict) else None
    match tag, node[tag] if tag else node:
        case (None | "$provided"), _:
            return {key: value(item, tensors) for key, item in node.items()} if isinstance(node, dict) else node
        case ("$tensor" | "$ndarray" | "$bytes_at" | "$bytearray_at"), name:
            return tensors[name] if tag in ("$tensor", "$ndarray") else tensors[name].tobytes()
        case ("$int" | "$float"), digits:
            return int(digits, 16) if tag == "$int" else struct.unpack(">d", bytes.fromhex(digits))[0]
        case ("$bytes" | "$bytearray" | "$text"), text:
            return unbase64(text).decode("utf-8", "surrogatepass") if tag == "$text" else unbase64(text)
        case "$numpy", kind if "hex" in node:
            return np.frombuffer(bytes.fromhex(node["hex"]), kind)[0]
        case ("$numpy" | "$named"), _:
            return value(node["text"], tensors) if "text" in node else unbase64(node["data"])
        case ("$dict" | "$ordered" | "$counter"), pairs:
            return {value(key, tensors): value(item, tensors) for key, item in pairs}
        case _, parts:
            parts, apart = value(parts, tensors), {"$slice": slice, "$range": range, "$complex": complex}
            whole = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$deque": list}
            return apart[tag](*parts) if tag in apart else whole[tag](parts)
