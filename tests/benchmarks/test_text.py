"""The text is the same every time, and held-out files stay held out."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from benchmarks import text


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for index in range(60):
        (tmp_path / f"m{index}.py").write_text(f"<{index}>" * 10)
    for excluded in ("test", "site-packages"):
        (tmp_path / excluded).mkdir()
        (tmp_path / excluded / "x.py").write_text("EXCLUDED")
    return tmp_path


def test_every_file_is_on_one_side(folder: pathlib.Path) -> None:
    found = text.standard_library(root=folder)
    sides = [set(part.tobytes().split(b"\n")) for part in (found.train, found.held_out)]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {f"<{index}>".encode() * 10 for index in range(60)}
    assert found.num_files == 60
    assert 1 <= len(sides[1]) <= 20  # about a tenth


def test_the_cap_holds_and_keeps_whole_files(folder: pathlib.Path) -> None:
    whole, capped = text.standard_library(root=folder), text.standard_library(1000, root=folder)
    assert len(capped.train) + len(capped.held_out) <= 1000 + capped.num_files
    assert capped.num_files < whole.num_files
    assert whole.train.tobytes().startswith(capped.train.tobytes())


def test_the_standard_library_itself_is_there_and_the_same_twice() -> None:
    first, second = text.standard_library(500_000), text.standard_library(500_000)
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.held_out, second.held_out)
    assert len(first.train) > 100_000
    assert b"import " in first.train.tobytes()


def test_too_little_text_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="fewer Python source files below"):
        text.standard_library(root=tmp_path)


def test_targets_are_the_next_bytes_and_batches_follow_from_seed_and_step(folder: pathlib.Path) -> None:
    corpus = text.standard_library(root=folder)
    batch = text.train_batch(corpus, 3, 16, seed=1, step=2)
    assert batch["inputs"].shape == batch["targets"].shape == (3, 16)
    assert batch["inputs"].dtype == np.int32
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["inputs"], text.train_batch(corpus, 3, 16, 1, 2)["inputs"])
    for other in ((1, 3), (2, 2)):
        assert np.any(batch["inputs"] != text.train_batch(corpus, 3, 16, *other)["inputs"])


def test_held_out_batches_come_from_held_out_files(folder: pathlib.Path) -> None:
    corpus = text.standard_library(root=folder)
    batches = text.held_out_batches(corpus, 2, 16, count=3)
    assert len(batches) == 3
    for batch in batches:
        for row in batch["inputs"].astype(np.uint8):
            assert row.tobytes() in corpus.held_out.tobytes()
