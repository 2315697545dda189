#!/usr/bin/env python
"""p5_ops.py: what pickle protocol 5 does to the arrays of paddle.save, by numpy and kind of array; and the opcodes of every protocol 5 file of CORPUS"""

import collections, glob, io, os, pickle, pickletools, sys
import numpy as np


def ops(b):
    c, g, st, arg1 = collections.Counter(), [], [], None
    for op, arg, pos in pickletools.genops(b):
        c[op.name] += 1
        if op.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            st.append(arg)
        if op.name == "STACK_GLOBAL":
            g.append(".".join(st[-2:]))
        if op.name == "GLOBAL":
            g.append(arg)
    return c, list(dict.fromkeys(g))


def main():
    print("numpy", np.__version__)
    mk = {
        "float32 (4,3)": np.ones((4, 3), "float32"),
        "bf16 as uint16 (4,3)": np.ones((4, 3), "uint16"),
        "int64 (2,)": np.arange(2),
        "0-d float32": np.array(1.5, "float32"),
        "empty (0,3)": np.zeros((0, 3), "float32"),
        ">64 KiB": np.ones((200, 100), "float32"),
        "Fortran (4,3)": np.asfortranarray(np.ones((4, 3), "float32")),
        "not contiguous": np.ones((8, 6), "float32")[::2, ::2],
        "big-endian": np.ones(3, ">f4"),
        "float16": np.ones(3, "float16"),
        "bool": np.ones(3, bool),
        "object": np.array([None, 1], object),
    }
    ro = np.ones((4, 3), "float32")
    ro.flags.writeable = False
    mk["read-only float32"] = ro
    big = np.ones((200, 100), "float32")
    big.flags.writeable = False
    mk["read-only >64 KiB"] = big
    mk["np.int64 scalar"] = np.int64(3)
    mk["np.float32 scalar"] = np.float32(3)
    for k, a in mk.items():
        c, g = ops(pickle.dumps(a, 5))
        pay = [
            o
            for o in (
                "BYTEARRAY8",
                "BINBYTES8",
                "BINBYTES",
                "SHORT_BINBYTES",
                "NEXT_BUFFER",
                "READONLY_BUFFER",
            )
            if c[o]
        ]
        print(
            f"  {k:22s} payload {'+'.join(pay) or '-':28s} globals {g}  {'order ' + str(a.flags.f_contiguous and not a.flags.c_contiguous and 'F' or 'C') if hasattr(a, 'flags') else ''} FRAME {c['FRAME']} BUILD {c['BUILD']}"
        )
    for f in sorted(glob.glob(os.environ.get("CORPUS", ".") + "/p5_*/checkpoint-3/**/*", recursive=True)):
        if not os.path.isfile(f):
            continue
        b = open(f, "rb").read()
        if b[:2] != b"\x80\x05":
            continue
        c, g = ops(b)
        print(
            "  ",
            f.split("/p5_", 1)[1],
            {
                k: v
                for k, v in c.most_common()
                if k
                in (
                    "BYTEARRAY8",
                    "BINBYTES8",
                    "BINBYTES",
                    "SHORT_BINBYTES",
                    "STACK_GLOBAL",
                    "REDUCE",
                    "BUILD",
                    "FRAME",
                    "NEXT_BUFFER",
                    "READONLY_BUFFER",
                    "NEWOBJ",
                    "BINPUT",
                    "MEMOIZE",
                    "LONG1",
                )
            },
            g,
        )


main()
