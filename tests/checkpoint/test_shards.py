"""Weights in several files: written once each, read again bit for bit, and refused where one is missing or damaged."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import acm_compiler as acm
from acm_compiler.errors import StorageError, UsageError
from acm_compiler.files import bytes_of
from tests.helpers.rewrite_cases import ALL, answer, rewritten


@pytest.fixture
def sharded(tmp_path):
    """(input, rewritten model with tied weights, folder it is saved in, names of its files of weights)."""
    _, x, model = rewritten(ALL["hf_gpt2"])
    acm.save(model, tmp_path / "out", max_shard_size="20KB")
    return x, model, tmp_path / "out", sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))


def test_weights_in_several_files_come_back(sharded):
    x, model, folder, names = sharded
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    loaded = acm.load(folder)
    assert torch.equal(answer(loaded, x), answer(model, x))
    wanted = model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


def test_the_index_names_the_file_of_every_tensor_once(sharded):
    _, _, folder, names = sharded
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = 0
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            held = set(file.keys()) - {file.metadata()["stop"]}
            sizes = [file.get_tensor(key).nbytes for key in held]
        assert held == {key for key, place in index["weight_map"].items() if place == name}
        assert sum(sizes) <= 20_000 or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total
    tied = {"lm_head.weight", "transformer.wte.weight"} & set(index["weight_map"])
    assert len(tied) == 1


def test_a_save_leaves_no_file_of_weights_of_the_one_before(sharded):
    x, model, folder, _ = sharded
    acm.save(model, folder)
    assert [path.name for path in folder.glob("model.safetensors*")] == ["model.safetensors"]
    assert not list(folder.glob("model-*"))
    acm.save(model, folder, max_shard_size=20_000)
    assert not (folder / "model.safetensors").exists()
    assert torch.equal(answer(acm.load(folder), x), answer(model, x))


def test_a_missing_file_is_named(sharded):
    _, _, folder, names = sharded
    (folder / names[1]).unlink()
    with pytest.raises(StorageError, match="cannot be read") as refused:
        acm.load(folder)
    assert names[1] in str(refused.value)


def test_a_damaged_file_is_named(sharded):
    _, _, folder, names = sharded
    data = bytearray((folder / names[1]).read_bytes())
    data[-1] ^= 1
    (folder / names[1]).write_bytes(data)
    with pytest.raises(StorageError, match="the file is damaged") as refused:
        acm.load(folder)
    assert names[1] in str(refused.value)


def test_a_file_without_one_of_its_tensors_is_refused(sharded):
    _, _, folder, names = sharded
    with safe_open(folder / names[1], framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / names[1])
    tensors.pop(next(key for key in tensors if key != metadata["stop"]))
    save_file(tensors, folder / names[1], metadata=metadata)
    with pytest.raises(StorageError, match="not the bytes that were saved"):
        acm.load(folder)


def test_a_file_of_another_save_is_refused(sharded):
    _, model, folder, names = sharded
    other = (folder / names[0]).read_bytes()
    acm.save(model, folder, max_shard_size="20KB")
    (folder / names[0]).write_bytes(other)
    with pytest.raises(StorageError, match="not of one save"):
        acm.load(folder)


@pytest.mark.parametrize("size", ["", "5", "GB", "0GB", 0, -1, True, None, 1.5])
def test_what_is_no_size_is_refused(size, tmp_path):
    _, _, model = rewritten(ALL["parallel"])
    with pytest.raises(UsageError, match="max_shard_size must be a size"):
        acm.save(model, tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


def test_sizes_are_read_as_transformers_reads_them():
    assert [bytes_of(text, "") for text in ("5GB", "1.5 kb", "2MiB", "7B")] == [5 * 10**9, 1500, 2 * 2**20, 7]
    assert bytes_of(123, "") == 123
