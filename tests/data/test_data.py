"""Data sets by kind, and the order and look of their batches."""

from __future__ import annotations

import hashlib
import pickle
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR100

from acm_compiler.data import Batch, BatchStream, open_dataset
from acm_compiler.data import digits as canvas_set
from acm_compiler.data.digits import CanvasSet
from acm_compiler.errors import AcmError, DataError, FunctionFailed, UsageError
from acm_compiler.recipe.datasets import ClutteredDigitsData, ImageFolderData, PythonData, TorchvisionData
from acm_compiler.sources.from_python import call_function, find_function

SIZE = (32, 32)


class Noise(torch.utils.data.Dataset):
    """Examples that consist of nothing but draws from all three global generators."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(torch.rand(())), random.random(), np.random.rand()]), index


class Failing(Noise):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            raise DataError("the image cannot be read", where="seven.png")
        return super().__getitem__(index)


class Ragged(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index + 1)}

    def collate(self, examples: list[dict[str, torch.Tensor]]) -> Batch:
        rows = [example["input_ids"] for example in examples]
        return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)}


def make_noise(count: int = 10) -> Noise:
    return Noise(count)


def make_nothing() -> int:
    return 3


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes with six pictures each, of different shapes."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for number in range(6):
            pixels = rng.integers(0, 256, (40 + 3 * number, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def folder(root: Path, **changes):
    return open_dataset(ImageFolderData(kind="imagefolder", root=str(root), **changes), image_size=SIZE)


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_an_epoch_taken_up_in_the_middle_continues_exactly(start: int) -> None:
    stream = BatchStream(dataset=Noise(), batch=3, seed=1, shuffle=True)
    whole = list(stream.epoch(2))
    assert len(whole) == len(stream) == 4
    torch.rand(1)
    assert same(list(stream.epoch(2, start)), whole[start:])


def test_each_epoch_has_its_own_order_and_its_own_randomness() -> None:
    stream = BatchStream(dataset=Noise(), batch=10, seed=1, shuffle=True)
    (first,), (second,) = stream.epoch(0), stream.epoch(1)
    assert not torch.equal(first["index"], second["index"])
    assert sorted(first["index"].tolist()) == sorted(second["index"].tolist()) == list(range(10))
    assert not set(first["image"][:, 0].tolist()) & set(second["image"][:, 0].tolist())


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    batches = list(BatchStream(dataset=Noise(), batch=4).epoch())
    assert [batch["index"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_another_seed_gives_other_examples_in_another_order() -> None:
    (first,), (second,) = (BatchStream(dataset=Noise(), batch=10, seed=s, shuffle=True).epoch() for s in (1, 2))
    assert not torch.equal(first["index"], second["index"])
    assert not torch.equal(first["image"].sort(0).values, second["image"].sort(0).values)


def test_loading_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    list(BatchStream(dataset=Noise(), batch=4, shuffle=True).epoch())
    found = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]


def test_processes_that_load_do_not_change_a_batch(pictures: Path) -> None:
    dataset = folder(pictures, augment="three_augment", mixup=0.8, cutmix=1.0)
    alone, helped = (
        list(BatchStream(dataset=dataset, batch=4, seed=3, shuffle=True, workers=workers).epoch(1))
        for workers in (0, 2)
    )
    assert same(alone, helped)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mixing", [{}, {"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 0.8}])
def test_ranks_together_see_what_one_process_sees(pictures: Path, world: int, mixing: dict) -> None:
    dataset = folder(pictures, augment="resize_crop", **mixing)
    one = list(BatchStream(dataset=dataset, batch=6, seed=1, shuffle=True, drop_last=True).epoch(1))
    ranks = [
        list(BatchStream(dataset=dataset, batch=6, seed=1, shuffle=True, drop_last=True, rank=r, world=world).epoch(1))
        for r in range(world)
    ]
    joined = [{k: torch.cat([part[k] for part in parts]) for k in parts[0]} for parts in zip(*ranks, strict=True)]
    assert same(joined, one)


def test_a_last_small_batch_is_shared_without_loss() -> None:
    ranks = [BatchStream(dataset=Noise(9), batch=4, rank=rank, world=2) for rank in range(2)]
    seen = [batch["index"].tolist() for stream in ranks for batch in stream.epoch()]
    assert seen == [[0, 1], [4, 5], [2, 3], [6, 7], [8]]


def test_drop_last_leaves_only_full_batches() -> None:
    stream = BatchStream(dataset=Noise(), batch=4, drop_last=True)
    assert len(stream) == 2 and [len(batch["label"]) for batch in stream.epoch()] == [4, 4]


def test_place_tells_the_epoch_and_batch_after_so_many_steps() -> None:
    stream = BatchStream(dataset=Noise(), batch=4)
    assert [stream.place(step) for step in (0, 2, 3, 7)] == [(0, 0), (0, 2), (1, 0), (2, 1)]


def test_sets_that_give_no_batch_are_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        BatchStream(dataset=Noise(0), batch=4)
    with pytest.raises(DataError, match="3 examples"):
        BatchStream(dataset=Noise(3), batch=4, drop_last=True)
    with pytest.raises(UsageError, match="multiple of 3"):
        BatchStream(dataset=Noise(), batch=4, drop_last=True, world=3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_refusal_while_loading_arrives_as_it_was_raised(workers: int) -> None:
    stream = BatchStream(dataset=Failing(), batch=5, workers=workers)
    with pytest.raises(DataError) as caught:
        list(stream.epoch())
    assert caught.value.where == "seven.png" and "Traceback" not in str(caught.value)


def test_a_data_sets_own_collate_is_used() -> None:
    (batch,) = BatchStream(dataset=Ragged(), batch=3).epoch()
    assert batch["input_ids"].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert batch["index"].tolist() == [0, 1, 2]


def test_items_that_are_no_examples_are_refused() -> None:
    with pytest.raises(DataError, match=r"pair \(image, label\)"):
        list(BatchStream(dataset=[1, 2, 3], batch=3).epoch())  # type: ignore[arg-type]


def test_pictures_come_resized_cropped_and_standardised(tmp_path: Path) -> None:
    (tmp_path / "grey").mkdir()
    Image.new("L", (64, 48), 128).save(tmp_path / "grey" / "a.png")
    example = folder(tmp_path)[0]
    expected = (128 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert example["image"].shape == (3, 32, 32) and example["label"] == 0
    assert torch.allclose(example["image"], expected[:, None, None].expand(3, 32, 32))


def test_evaluation_keeps_the_centre(tmp_path: Path) -> None:
    (tmp_path / "frame").mkdir()
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[8:56, 8:56] = 255
    Image.fromarray(pixels).save(tmp_path / "frame" / "a.png")
    image = folder(tmp_path, crop_ratio=0.5, mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0])[0]["image"]
    assert image.min() == 1  # 64 pixels are kept at 64, and the middle 32 have no dark border


@pytest.mark.parametrize("augment", ["resize_crop", "three_augment"])
def test_augmentation_is_a_function_of_seed_epoch_and_index(pictures: Path, augment: str) -> None:
    dataset = folder(pictures, augment=augment)

    def seen(seed: int, epoch: int, batch: int) -> torch.Tensor:
        stream = BatchStream(dataset=dataset, batch=batch, seed=seed)
        return torch.cat([part["image"] for part in stream.epoch(epoch)])

    first = seen(0, 0, 4)
    assert first.shape == (12, 3, 32, 32) and first.isfinite().all()
    assert torch.equal(first, seen(0, 0, 5))
    assert not torch.equal(first, seen(0, 1, 4)) and not torch.equal(first, seen(1, 0, 4))


def test_three_augment_makes_each_of_its_three_changes(tmp_path: Path) -> None:
    (tmp_path / "red").mkdir()
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[::2, :, 0], pixels[1::2, :, 0] = 200, 40
    Image.fromarray(pixels).save(tmp_path / "red" / "a.png")
    dataset = folder(tmp_path, augment="three_augment", color_jitter=0.0, mean=[0.0] * 3, std=[1.0] * 3)
    stream = BatchStream(dataset=dataset, batch=1)
    images = [batch["image"][0, :, 8:24, 8:24] for epoch in range(24) for batch in stream.epoch(epoch)]
    grey = sum(torch.equal(image[0], image[2]) for image in images)
    solarised = sum(bool(torch.isclose(image[0].max(), torch.tensor(55 / 255))) for image in images)
    blurred = sum(bool(image[2].max() == 0 and 60 / 255 < image[0].max() < 200 / 255) for image in images)
    assert min(grey, solarised, blurred) >= 3 and grey + solarised + blurred >= 20


def test_mixup_blends_each_example_with_the_one_before(pictures: Path) -> None:
    plain, mixed = (
        next(iter(BatchStream(dataset=folder(pictures, mixup=alpha), batch=12, seed=2).epoch())) for alpha in (0.0, 0.8)
    )
    assert mixed["label"].shape == (12, 2) and torch.allclose(mixed["label"].sum(1), torch.ones(12))
    share = mixed["label"][0, 0].item()  # the first is a cat, the one before it (the last) a dog
    assert 0 < share < 1
    expected = share * plain["image"] + (1 - share) * plain["image"].roll(1, 0)
    assert torch.allclose(mixed["image"], expected, atol=1e-5)


def test_a_missing_folder_is_told_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        folder(tmp_path / "nowhere")


def test_folders_without_pictures_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        folder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="cat"):
        folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_an_unreadable_picture_is_told_by_its_path(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "cat").mkdir()
    path = tmp_path / "cat" / "broken.png"
    if content is None:  # cut off in the middle
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
        content = path.read_bytes()[:2000]
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.png"):
        folder(tmp_path)[0]


def test_a_tiff_that_says_where_its_pixels_are_in_words_is_told_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    path = tmp_path / "cat" / "broken.tiff"
    Image.new("RGB", (4, 4)).save(path)
    content = bytearray(path.read_bytes())
    place_of_pixels, number, words = 273, 4, 2
    entry = content.index(struct.pack("<HH", place_of_pixels, number))
    content[entry + 2] = words
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.tiff"):
        folder(tmp_path)[0]


def test_a_data_set_of_torchvisions_is_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
    contents = {
        "meta": {"fine_label_names": ["apple", "whale"]},
        "train": {"data": np.zeros((3, 3072), np.uint8), "fine_labels": [0, 0, 1]},
        "test": {"data": pixels.reshape(2, 3072), "fine_labels": [1, 0]},
    }
    (tmp_path / "cifar-100-python").mkdir()
    sums = {}
    for name, content in contents.items():
        written = pickle.dumps(content)
        (tmp_path / "cifar-100-python" / name).write_bytes(written)
        sums[name] = hashlib.md5(written).hexdigest()
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})
    monkeypatch.setattr(CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", sums["test"]]])
    config = TorchvisionData(
        kind="torchvision", name="CIFAR100", root=str(tmp_path), args={"train": False}, crop_ratio=1.0, mixup=0.8
    )
    dataset = open_dataset(config, image_size=(32, 32))
    assert len(dataset) == 2 and dataset[0]["label"] == 1  # type: ignore[arg-type]
    standardised = (torch.from_numpy(pixels[0]) / 255 - torch.tensor(config.mean)[:, None, None]) / torch.tensor(
        config.std
    )[:, None, None]
    torch.testing.assert_close(dataset[0]["image"], standardised)
    (batch,) = BatchStream(dataset=dataset, batch=2).epoch()
    assert batch["label"].shape == (2, 2)  # mixed labels are shares of the classes
    assert len(open_dataset(config.model_copy(update={"args": {}}))) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"name": "CIFAR1000"}, UsageError, "did you mean 'CIFAR100'"),
        ({"args": {"split": "test"}}, UsageError, "unexpected keyword argument 'split'"),
        ({}, FunctionFailed, "not found or corrupted"),
        ({"name": "read_image"}, UsageError, "has no 'read_image'"),
        ({"name": "wrap_dataset_for_transforms_v2"}, UsageError, "does not take the recipe's args"),
    ],
)
def test_a_data_set_that_torchvision_cannot_read_is_refused(
    tmp_path: Path, changes: dict[str, object], error: type[AcmError], said: str
) -> None:
    config = TorchvisionData(kind="torchvision", name="CIFAR100", root=str(tmp_path))
    with pytest.raises(error, match=said):
        open_dataset(config.model_copy(update=changes))


def test_a_data_set_of_several_targets_is_refused(tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "eurosat").mkdir()
    (tmp_path / "eurosat/2750").symlink_to(pictures)
    config = TorchvisionData(kind="torchvision", name="EuroSAT", root=str(tmp_path))
    assert open_dataset(config).classes == ["cat", "dog"]  # type: ignore[attr-defined]
    config = config.model_copy(update={"args": {"target_transform": str}})
    with pytest.raises(UsageError, match="one class each"):
        open_dataset(config)


def test_cluttered_digits_come_with_mask_and_source() -> None:
    config = ClutteredDigitsData(kind="cluttered_digits", split="eval", count=1300)
    dataset = open_dataset(config, image_size=(36, 36))
    (batch,) = BatchStream(dataset=dataset, batch=1300, shuffle=True).epoch()
    assert batch["image"].shape == (1300, 3, 36, 36) and batch["foreground"].shape == (1300, 36, 36)
    place = int((batch["index"] == 1200).nonzero())
    example = dataset[1200]
    for name in ("image", "label", "source", "foreground"):
        assert torch.equal(example[name], batch[name][place])
    assert len(dataset.classes) == 10  # type: ignore[attr-defined]


def test_canvases_are_drawn_once_and_not_by_every_process_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = CanvasSet("train", count=6)
    (first,) = BatchStream(dataset=dataset, batch=6).epoch()
    monkeypatch.setattr(canvas_set, "canvases", None)  # drawing again would now fail
    (second,) = BatchStream(dataset=dataset, batch=6, workers=1).epoch()
    assert same([first], [second])
    assert same([first], list(BatchStream(dataset=CanvasSet("train", count=6), batch=6).epoch()))
    with pytest.raises(TypeError):
        next(iter(BatchStream(dataset=CanvasSet("train", count=7), batch=7, workers=1).epoch()))


def test_pictures_come_in_the_size_that_their_section_names_else_the_models(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (50, 40)).save(tmp_path / "a/0.png")
    for own, model, side in ((24, (32, 32), 24), (None, (32, 32), 32), (24, None, 24), (None, None, 224)):
        config = ImageFolderData(kind="imagefolder", root=str(tmp_path), image_size=own)
        assert open_dataset(config, image_size=model)[0]["image"].shape == (3, side, side)


def test_cluttered_digits_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match="224 x 224"):
        open_dataset(ClutteredDigitsData(kind="cluttered_digits", split="eval"), image_size=(224, 224))


def test_a_users_function_gives_the_data_set() -> None:
    config = PythonData(kind=f"python:{__name__}:make_noise", args={"count": 4})
    assert len(open_dataset(config)) == 4  # type: ignore[arg-type]
    with pytest.raises(DataError, match="int"):
        open_dataset(PythonData(kind=f"python:{__name__}:make_nothing"))


def make_trouble(name: str) -> None:
    raise KeyError(name)


def test_a_users_function_that_raises_shows_its_own_lines() -> None:
    with pytest.raises(FunctionFailed) as caught:
        call_function(f"python:{__name__}:make_trouble", {"name": "noise"})
    what, frame, line = str(caught.value).splitlines()
    assert what == f"python:{__name__}:make_trouble: the function raised KeyError: 'noise'"
    assert frame.startswith(f'  File "{__file__}", line ') and frame.endswith(", in make_trouble")
    assert line == "    raise KeyError(name)"
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.exit_code == 1


class Broken(Noise):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise KeyError("no such clip")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_data_set_that_raises_shows_its_own_lines(workers: int) -> None:
    with pytest.raises(FunctionFailed) as caught:
        list(BatchStream(dataset=Broken(), batch=5, workers=workers).epoch())
    what, frame, line = str(caught.value).splitlines()
    assert what == "Broken: the data set raised KeyError: 'no such clip'"
    assert frame.startswith(f'  File "{__file__}", line ') and frame.endswith(", in __getitem__")
    assert line == '    raise KeyError("no such clip")'


@pytest.mark.parametrize("method", ["__len__", "prepare", "group"])
def test_whatever_a_users_data_set_is_asked_shows_its_own_lines(method: str) -> None:
    def raises(self: object, *_: object) -> None:
        raise KeyError("no such clip")

    dataset = type("Broken", (Noise,), {"__module__": __name__, method: raises})()
    with pytest.raises(FunctionFailed) as caught:
        list(BatchStream(dataset=dataset, batch=5).epoch())
    what, frame, line = str(caught.value).splitlines()
    assert what == "Broken: the data set raised KeyError: 'no such clip'"
    assert frame.startswith(f'  File "{__file__}", line ') and line == '    raise KeyError("no such clip")'


def make_an_end() -> None:
    sys.exit(3)


def make_an_interruption() -> None:
    raise KeyboardInterrupt


def test_a_users_function_that_ends_the_program_is_named() -> None:
    with pytest.raises(FunctionFailed) as caught:
        call_function(f"python:{__name__}:make_an_end", {})
    assert str(caught.value).splitlines()[0] == f"python:{__name__}:make_an_end: the function raised SystemExit: 3"
    with pytest.raises(KeyboardInterrupt):
        call_function(f"python:{__name__}:make_an_interruption", {})


def test_a_users_module_that_cannot_be_imported_shows_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FunctionFailed, match="importing broken_module raised ModuleNotFoundError") as caught:
        find_function("python:broken_module:make")
    assert f'File "{tmp_path / "broken_module.py"}", line 1' in str(caught.value)


def test_what_is_missing_of_a_users_function_is_told() -> None:
    with pytest.raises(UsageError, match="no module 'nowhere'"):
        find_function("python:nowhere.data:make")
    with pytest.raises(UsageError, match="did you mean 'make_noise'"):
        find_function(f"python:{__name__}:make_noize")
    with pytest.raises(UsageError, match="unexpected keyword argument 'counts'"):
        call_function(f"python:{__name__}:make_noise", {"counts": 3})
    with pytest.raises(UsageError, match="not a function"):
        find_function(f"python:{__name__}:SIZE")
