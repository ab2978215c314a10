"""Calibration with what it makes in files, or in host memory: the same model, bit for bit, in little memory."""

import errno
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import StorageError, UsageError
from acm_compiler.passes.rewrite import offload
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.passes.rewrite.rewrite import copied
from tests.helpers.calibrate_in_little_memory import Deep, status
from tests.helpers.calibration_tiny import make_tiny, texts

pytestmark = pytest.mark.usefixtures("rough_budgets")

DATA = texts(14)


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch):
    """Offload tensors of all sizes, as a model of this size has no large ones."""
    monkeypatch.setattr(offload, "_SMALL", 1)


def in_file(tensor) -> bool:
    return tensor.untyped_storage().filename is not None


def same(one, other) -> None:
    assert conversion(one).table == conversion(other).table
    assert conversion(one).damage == conversion(other).damage
    wanted = one.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.state_dict().items())


def test_offloading_changes_no_bit(tmp_path):
    plain, offloaded = make_tiny(depth=2), make_tiny(depth=2)
    acm.calibrate(plain, DATA, tokens=120)
    acm.calibrate(offloaded, DATA, tokens=120, offload=tmp_path / "new")
    same(plain, offloaded)
    assert all(in_file(p) for site in sites(offloaded).values() for p in site.learners.parameters())
    assert os.listdir(tmp_path / "new") == []


class Copies:
    """Bytes on the working device of tensors that lie in host memory: now, and at most."""

    def __init__(self, monkeypatch):
        self.now = self.most = self.count = 0
        self.copy = offload.onto
        monkeypatch.setattr(offload, "onto", self)

    def __call__(self, tensor, device):
        copied = self.copy(tensor, device)
        storage = copied.untyped_storage()
        self.count, self.now = self.count + 1, self.now + storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, storage.nbytes())
        return copied

    def gone(self, size_bytes):
        self.now -= size_bytes


def test_streaming_changes_no_bit_and_takes_memory_for_a_tensor_at_a_time(monkeypatch):
    copies = Copies(monkeypatch)
    plain, streamed = make_tiny(depth=4), make_tiny(depth=4)
    acm.calibrate(plain, DATA, tokens=120, local_steps=3, gradient_tokens=60)
    assert not copies.count
    acm.calibrate(streamed, DATA, tokens=120, local_steps=3, gradient_tokens=60, offload="cpu")
    same(plain, streamed)
    weights = sum(parameter.nbytes for parameter in streamed.parameters())
    assert copies.now == 0 and 0 < copies.most < weights / 3
    assert not any(map(offload.streamed_to, streamed.parameters()))


def decoder():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, tie_word_embeddings=True, **sizes)).eval()


def encoder():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=96, **sizes)).eval()


@pytest.mark.parametrize(("make", "dtype"), [(encoder, torch.float32), (decoder, torch.bfloat16)])
def test_models_read_from_several_files_are_calibrated_alike(make, dtype, tmp_path):
    """Slices of attention, and tied weights, from a checkpoint of transformers in shards."""
    make().to(dtype).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    generator = torch.Generator().manual_seed(1)
    batches = [{"input_ids": torch.randint(0, 96, (4, 12), generator=generator)} for _ in range(9)]
    models = []
    for where in (None, tmp_path, "cpu"):
        original = type(make()).from_pretrained(tmp_path / "model", dtype=dtype).eval()
        model = acm.rewrite(original, acm.plan(original, batches[0]), offload=where)
        assert where != tmp_path or all(in_file(p) for name, p in model.named_parameters() if ".dense." not in name)
        before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
        acm.calibrate(model, batches, tokens=300, offload=where)
        assert all(torch.equal(tensor, before[name]) for name, tensor in original.state_dict().items())
        models.append(model)
    same(*models[:2])
    same(models[0], models[2])
    acm.save(models[1], tmp_path / "saved")
    with torch.no_grad():
        wanted, found = (model(**batches[0])[0] for model in (models[0], acm.load(tmp_path / "saved")))
    torch.testing.assert_close(found, wanted)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "saved"}


@pytest.mark.parametrize("where", ["folder", "cpu"])
def test_an_interrupt_leaves_the_model_as_it_was_and_no_file(where, tmp_path):
    model = make_tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def interrupt(line):
        if ": site " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        acm.calibrate(model, DATA, tokens=120, offload=tmp_path if where == "folder" else where, progress=interrupt)
    assert not any(map(offload.streamed_to, model.parameters()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert os.listdir(tmp_path) == []
    assert offload.kept(tensor := torch.zeros(3)) is tensor


def test_a_full_disk_is_an_error_in_words(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"No space left on device.*\n.*make room") as refused:
        acm.calibrate(make_tiny(), DATA, tokens=120, offload=tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert os.listdir(tmp_path) == []


def test_places_that_nothing_can_be_offloaded_to_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose a folder"):
        acm.calibrate(make_tiny(), DATA, offload=tmp_path / "file")
    with pytest.raises(UsageError, match="a folder must be a path"):
        acm.calibrate(make_tiny(), DATA, offload=3)
    with pytest.raises(UsageError, match=r"a model on meta.*\n.*offload='cpu'.*run.device: cpu"):
        acm.calibrate(make_tiny().to("meta"), DATA, offload=tmp_path)


def test_tensors_keep_their_order_in_memory_and_their_ties(tmp_path):
    turned, row = torch.randn(4, 6).T, torch.randn(5)
    with offload.offloading(tmp_path):
        (one, two), wide = offload.kept(((turned, turned), row.expand(3, 5)))
        assert one is two and one.stride() == turned.stride() and torch.equal(one, turned)
        assert torch.equal(wide, row.expand(3, 5)) and in_file(wide)
        assert offload.kept(one) is one
    assert in_file(one) and not in_file(row)


def test_a_copy_lies_in_a_file_of_its_own(tmp_path):
    model = make_tiny()
    with offload.offloading(tmp_path):
        mapped = offload.kept(model)
        again = copied(mapped)
    pairs = list(zip(mapped.parameters(), again.parameters(), strict=True))
    assert all(in_file(two) and one.data_ptr() != two.data_ptr() and torch.equal(one, two) for one, two in pairs)


@pytest.mark.skipif(sys.platform != "linux", reason="what a process allocates is in a file of Linux")
def test_a_conversion_in_files_leaves_nothing_allocated(tmp_path, monkeypatch):
    """Memory of one site's weights serves for the next, though small things are allocated in between."""
    monkeypatch.setattr(offload, "_SMALL", 2**16)
    model = Deep(24, 512)
    plan = acm.plan(model, torch.randn(1, 8, 512), sites="mlp")
    before = status("VmData")
    acm.rewrite(model, plan, inplace=True, offload=tmp_path)
    assert status("VmData") - before < 24 * 2 * 512**2 * 4 / 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process allocates is limited by the kernel of Linux")
@pytest.mark.parametrize(("where", "done"), [("offload", True), ("memory", False)])
def test_weights_of_twice_the_memory_are_calibrated(where, done, tmp_path):
    script = "tests.helpers.calibrate_in_little_memory"
    command = [sys.executable, "-m", script, where, tmp_path, "160", "512"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (run.returncode == 0) == done, run.stderr
    assert done or re.search("allocate memory|temporarily unavailable", run.stderr)
    if done:
        weights, grown, _ = map(int, re.findall(r"(\d+) MiB", run.stdout))
        assert grown < weights / 2
