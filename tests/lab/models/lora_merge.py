#!/usr/bin/env python
"""lora_merge.py CASE...  -- the library's own merge (paddleformers.mergekit, what `paddleformers-cli export` runs) of a single-card LoRA case.
Base and merged weights are put next to the truth: truth_base.safetensors, truth_merged.safetensors (bit patterns of the library's output file)."""

import glob, os, shutil, sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
CORPUS, LAB = os.environ["CORPUS"], os.environ["LAB"]
import paddle

paddle.set_device("cpu")
from paddleformers.mergekit import MergeConfig, MergeModel
from compare_raw import read, write

for n in sys.argv[1:]:
    base, out = f"{LAB}/out/{n}/base", f"{LAB}/out/{n}/merged"
    shutil.rmtree(out, ignore_errors=True)
    MergeModel(
        MergeConfig(
            base_model_path=base,
            lora_model_path=f"{CORPUS}/{n}/checkpoint-3",
            output_path=out,
            convert_from_hf=False,
            save_to_hf=False,
        )
    ).merge_model()
    t = {}
    for f in glob.glob(out + "/*.safetensors"):
        t.update(read(f))
    write(t, f"{CORPUS}/{n}/truth_merged.safetensors")
    shutil.copy(f"{LAB}/out/{n}/truth_base.safetensors", f"{CORPUS}/{n}/")
    os.makedirs(f"{CORPUS}/{n}/base", exist_ok=True)
    for f in os.listdir(base):
        shutil.copy(f"{base}/{f}", f"{CORPUS}/{n}/base/")
    print(
        n,
        "merged",
        len(t),
        {d: sum(1 for v in t.values() if v[0] == d) for d in {v[0] for v in t.values()}},
        os.listdir(out),
    )
