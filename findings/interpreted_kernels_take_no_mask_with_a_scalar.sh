#!/usr/bin/env bash
# Triton 3.9.0 under TRITON_INTERPRET=1: a mask that joins the condition of a block with one of a scalar raises InterpreterError:
# ValueError('mask has unsupported dtype'). A mask of two conditions of blocks is taken.
#
# Valid input: mask=(i < 3) & (number > 0), where i is a block and the number was loaded. The interpreter is Triton's documented way to
# run kernels without a GPU. Seen in vLLM 0.32.0: the mask of its _ngram_finalize_kernel is such, so speculation by ngram_gpu does not
# run interpreted.
#
# Needs Python 3.11; installs torch 2.13.0 and Triton 3.9.0 into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 triton==3.9.0 numpy

cat >"$folder/kernels.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def block_and_block(numbers, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    number = tl.load(numbers)
    tl.store(out + i, i, mask=(i < 3) & (i < number))


@triton.jit
def block_and_scalar(numbers, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    number = tl.load(numbers)
    tl.store(out + i, i, mask=(i < 3) & (number > 0))


print("torch", torch.__version__.split("+")[0], "triton", triton.__version__)
for kernel in (block_and_block, block_and_scalar):
    out = torch.full((4,), -1, dtype=torch.int32)
    try:
        kernel[(1,)](torch.tensor([4], dtype=torch.int32), out, 4)
        print(kernel.fn.__name__, out.tolist())
    except Exception as error:
        print(kernel.fn.__name__, type(error).__name__, error)
PYTHON

cat >"$folder/expected" <<'OUTPUT'
torch 2.13.0 triton 3.9.0
block_and_block [0, 1, 2, -1]
block_and_scalar InterpreterError ValueError('mask has unsupported dtype')
OUTPUT

cd "$folder" && TRITON_INTERPRET=1 venv/bin/python kernels.py | tee seen
diff expected seen || { echo "this is no longer what the finding states"; exit 1; }
