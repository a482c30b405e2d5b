"""`dspine convert` on the command line."""

from __future__ import annotations

import numpy as np

from dspine.common.configs import load_drafter_config
from tests.helpers.drafters import drafter_folder
from tests.helpers.goldens import golden_folder


def test_convert_prints_what_it_did(dspine, tmp_path):
    head = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    folder = drafter_folder(tmp_path / "d", "domino", 5, head, intermediate_size=64, num_attention_heads=8)
    run = dspine("convert", folder, tmp_path / "q", "--bits", "4", "--mixed")
    assert (
        run.code == 0 and run.out.startswith("domino drafter, ") and f"written to {tmp_path / 'q'}" in " ".join(run.out.split())
    )
    assert "largest relative error" in run.out and load_drafter_config(tmp_path / "q").quantization["bits"] == 4
    run = dspine("convert", golden_folder("dspine", tmp_path), tmp_path / "two", "--form", "two-file")
    assert run.code == 0 and "transfer.safetensors" in run.out and (tmp_path / "two/transfer.safetensors").is_file()


def test_convert_refuses_in_one_line(dspine, tmp_path):
    folder = golden_folder("dflash2", tmp_path)
    for arguments in ((folder, folder), (folder, tmp_path / "x", "--form", "two-file"), (folder, tmp_path / "x", "--bits", "3"),
                      (tmp_path / "none", tmp_path / "x"), ("auto", tmp_path / "x")):  # fmt: skip
        run = dspine("convert", *arguments)
        assert run.code == 2 and "Traceback" not in run.err, arguments
        assert not (tmp_path / "x").exists()
