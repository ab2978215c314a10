"""Files of weights: each storage once, in parts, and refused where they are not what the model holds."""

import copy
import json

import pytest
import torch
from torch import nn

from acm_compiler.checkpoint.tensors import collect, fill, index_of, read_tensors, shards, write_tensors
from acm_compiler.errors import StorageError


class Tied(nn.Module):
    """An embedding whose matrix is the head's, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.randn(3))


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    model, other = Tied(), Tied()
    tensors, aliases = collect(model)
    assert sorted(tensors) == ["embed.weight", "scale"] and aliases == {"head.weight": "embed.weight"}
    write_tensors(tmp_path / "w.safetensors", tensors, aliases, save_id="one")
    stored = read_tensors([tmp_path / "w.safetensors"])
    other.head.weight = nn.Parameter(torch.zeros(6, 4))
    fill(other, stored, where="w")
    assert other.head.weight is other.embed.weight and stored.save_id == "one"
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_part_of_a_storage_takes_its_own_room_alone(tmp_path):
    large = torch.randn(1000, 8)
    write_tensors(tmp_path / "w.safetensors", {"part": large[:2].t()}, {}, save_id="one")
    assert (tmp_path / "w.safetensors").stat().st_size < 1000
    assert torch.equal(read_tensors([tmp_path / "w.safetensors"]).tensors["part"], large[:2].t())


def test_files_hold_so_many_bytes_or_one_tensor():
    tensors = {name: torch.zeros(size) for name, size in (("a", 4), ("b", 4), ("c", 100), ("d", 1))}
    files = shards(tensors, 32, "model.safetensors")
    assert [sorted(part) for part in files.values()] == [["a", "b"], ["c"], ["d"]]
    assert next(iter(files)) == "model-00001-of-00003.safetensors"
    index = json.loads(index_of(files))
    assert index["metadata"]["total_size"] == 4 * 109 and index["weight_map"]["c"] == list(files)[1]
    assert list(shards(tensors, 10**6, "model.safetensors")) == ["model.safetensors"]


def test_files_of_two_saves_have_no_common_identifier(tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for path in paths:
        write_tensors(path, {path.stem: torch.ones(1)}, {}, save_id=path.stem)
    assert read_tensors(paths).save_id is None and set(read_tensors(paths).tensors) == {"a", "b"}


def test_other_names_and_shapes_are_refused(tmp_path):
    model = Tied()
    tensors, aliases = collect(model)
    before = copy.deepcopy(model.state_dict())
    for changed in ({"scale": torch.ones(4)}, {"more": torch.ones(1)}):
        write_tensors(tmp_path / "w.safetensors", tensors | changed, aliases, save_id="one")
        with pytest.raises(StorageError):
            fill(model, read_tensors([tmp_path / "w.safetensors"]), where="w")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"no weights")
    with pytest.raises(StorageError, match=r"w\.safetensors"):
        read_tensors([tmp_path / "w.safetensors"])
