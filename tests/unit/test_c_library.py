"""What a call through `CLibrary` passes to a library: all arguments in the card's order, its own message, from any thread."""

from __future__ import annotations

import shutil
import subprocess
import threading

import pytest
import torch
from deepinfer_hal.c_abi import CLibrary, include_dir, pack_tensor
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import BackendError, BadCall, DeepInferError

SOURCE = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "deepinfer/hal.h"

/* Adds up what it was given, waiting in between, so that threads' calls overlap. */
int di_rms_norm(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes, di_error* e) {
  double* sums = (double*)t[2].data;
  sums[0] = n;
  for (int i = 0; i < p->n_i; ++i) sums[1] += p->i[i];
  usleep(200);
  for (int i = 0; i < p->n_d; ++i) sums[2] += p->d[i];
  sums[3] = (double)(size_t)stream + (double)(size_t)ws + ws_bytes;
  return 0;
}

int di_rope(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes, di_error* e) {
  if (p->n_i == 1 && p->i[0] == 1) return snprintf(e->message, sizeof e->message, "turned") > 0 ? 1 : 0;
  return 9;
}

/* Fails with the number of integers that it is given; its text has no end, and that of success goes with no failure. */
int di_quantise(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes, di_error* e) {
  const char* text = p->n_i == 0 ? "the slow path serves" : p->n_i == 1 ? "a long reason of a refusal" : "short";
  if (p->n_i < 3) memcpy(e->message, text, strlen(text));
  return p->n_i;
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("library")
    (folder / "kernels.c").write_text(SOURCE)
    made = folder / "kernels.so"
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{include_dir()}", folder / "kernels.c", "-o", made], check=True)
    return made


def test_integers_and_reals_arrive_whatever_their_number(built):
    call = CLibrary(built, stream=8, workspace=(16, 32)).function("rms_norm")
    for integers, numbers in (([1, 2], [0.5]), ([], []), ([7], [0.25, 0.5, 1.0]), ([1, 2], [0.5])):
        sums = torch.zeros(4, dtype=torch.float64)
        call([pack_tensor(None), pack_tensor(None), pack_tensor(sums)], integers, numbers)
        assert sums.tolist() == [3, sum(integers), sum(numbers), 56]


def test_the_stream_and_its_workspace_are_asked_for_at_each_call(built):
    streams = iter((1, 2))
    call = CLibrary(built, stream=lambda: next(streams), workspace=lambda stream: (10 * stream, 100)).function("rms_norm")
    for wanted in (111, 122):
        sums = torch.zeros(4, dtype=torch.float64)
        call([pack_tensor(None), pack_tensor(None), pack_tensor(sums)], [], [])
        assert sums[3] == wanted


def test_threads_that_call_at_once_pass_their_own_numbers(built):
    call, wrong = CLibrary(built).function("rms_norm"), []

    def run(number: int) -> None:
        for _ in range(50):
            sums = torch.zeros(4, dtype=torch.float64)
            call([pack_tensor(None), pack_tensor(None), pack_tensor(sums)], [number], [number / 2])
            if sums[1:3].tolist() != [number, number / 2]:
                wrong.append(sums)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_message_of_another_call_is_no_reason(built):
    call = CLibrary(built).function("quantise")
    for integers, wanted in (([1], "a long reason of a refusal"), ([1, 2], "short"), ([1, 2, 3], "status 3")):
        call([], [], [])
        with pytest.raises(DeepInferError, match=f"quantise: {wanted}$"):
            call([], integers, [])


def test_a_message_is_that_of_its_own_call(built):
    rope = CLibrary(built).bind(get_card("rope"))
    args = torch.zeros(2, dtype=torch.int32), torch.zeros(4, 2)
    for _ in range(2):
        with pytest.raises(BadCall, match="rope: turned$"):
            rope(*args, True, None, torch.zeros(2, 1, 4))
        with pytest.raises(BackendError, match="rope: status 9$"):
            rope(*args, inverse=False, x=torch.zeros(2, 1, 4))
