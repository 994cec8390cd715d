"""Compare quantised linear layers with the packed bfloat16 layer: python bench/linear.py [--rows 1,8] [--threads 1,2]

Each round runs all kinds in alternation, over several copies of a layer, so that weights come from memory or the shared
cache. A column is the time in bfloat16 divided by the time of this kind, as medians.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout
from pagepool.integrations.transformers.linear import PackedLayer, QuantisedLayer
from pagepool.integrations.transformers.quantised import FORMATS, QuantisedLinear, pack

SHAPES = {  # of SmolLM2-135M: query, key and value; output; gate and up; down. The last one is of a 1.1B Llama
    "576 x 960": (576, 960),
    "576 x 576": (576, 576),
    "576 x 3072": (576, 3072),
    "1536 x 576": (1536, 576),
    "2048 x 5632": (2048, 5632),
}
COLD = 12 << 20  # bytes of the bfloat16 copies of a layer, at least
SECONDS = 0.15  # of a kind and number of rows, about


def quantised(form, inputs, outputs):
    levels = torch.randint(0, 256, (outputs, inputs // 32, 32 if form == 0 else 16), dtype=torch.uint8)
    scale = torch.rand(outputs, inputs // 32).half() / 100
    least = scale if form == FORMATS.index("int4 with least") else None
    return QuantisedLayer([QuantisedLinear(pack(form, levels, scale, least))])


def packed(inputs, outputs):
    layer = PackedLayer([torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)])
    layer.use_huge_pages()
    return layer


def compare(layers, rows, inputs, clock):
    """Return the median seconds of a layer of each kind."""
    x, times = torch.randn(rows, inputs).bfloat16(), [[] for _ in layers]
    spent, rounds = 0.0, 0
    while rounds < 3 or spent < SECONDS * len(layers):
        for own, copies in zip(times, layers, strict=True):
            begin = clock()
            for layer in copies:
                layer.run(x)
            own.append((clock() - begin) / len(copies))
        if rounds:  # the first round is a warm-up
            spent += sum(own[-1] * len(copies) for own, copies in zip(times, layers, strict=True))
        rounds += 1
    return [median(own[1:]) for own in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    options = parser.parse_args()
    print("layer         threads  rows  bfloat16, us", *(f"{form:>15}" for form in FORMATS))
    with torch.inference_mode():
        for name in options.shapes.split(","):
            inputs, outputs = SHAPES[name]
            copies = range(max(2, COLD // (2 * inputs * outputs)))
            layers = [[packed(inputs, outputs) for _ in copies]]
            layers += [[quantised(form, inputs, outputs) for _ in copies] for form in range(len(FORMATS))]
            for threads in map(int, options.threads.split(",")):
                clock = time.process_time if threads == 1 else time.perf_counter
                torch.set_num_threads(threads)
                for rows in map(int, options.rows.split(",")):
                    first, *others = compare(layers, rows, inputs, clock)
                    ratios = " ".join(f"{first / own:15.2f}" for own in others)
                    print(f"{name:13} {threads:7} {rows:5} {first * 1e6:13.0f} {ratios}", flush=True)


if __name__ == "__main__":
    main()
