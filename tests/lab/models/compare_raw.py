"""safetensors as {key: (dtype, shape, bytes)}, no framework"""

import json, struct


def read(path):
    raw = open(path, "rb").read()
    n = struct.unpack("<Q", raw[:8])[0]
    h = json.loads(raw[8 : 8 + n])
    h.pop("__metadata__", None)
    return {
        k: (v["dtype"], v["shape"], raw[8 + n + v["data_offsets"][0] : 8 + n + v["data_offsets"][1]])
        for k, v in h.items()
    }


def write(d, path):
    hdr, off = {}, 0
    for k in sorted(d):
        dt, sh, b = d[k]
        hdr[k] = {"dtype": dt, "shape": list(sh), "data_offsets": [off, off + len(b)]}
        off += len(b)
    h = json.dumps(hdr).encode()
    h += b" " * (-len(h) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h)
        for k in sorted(d):
            f.write(d[k][2])
