"""The digest of weights: every byte counts, and a remembered digest is never that of another file."""

import json
import os
import subprocess
import time

import pytest
from refusals import refuses

from pagepool.prefix import fingerprint
from pagepool.prefix.fingerprint import weights_digest

BIG = 3_000_000  # only digests of large files are remembered


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory with weights that are settled at once."""
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", 0)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(bytes(BIG))
    (folder / "config.json").write_text("{}")
    time.sleep(0.02)  # the resolution of a file's times
    return folder


def entry_of(known, folder):
    return json.loads(known.read_bytes())[str(folder / "a.safetensors")]


def write_in_place(file, place, data):
    """Change bytes and keep inode, size and time of modification, as `rsync --inplace -t` does."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_every_byte_counts_and_is_read_once(model, tmp_path):
    known, file = tmp_path / "known.json", model / "a.safetensors"
    first = weights_digest(model, known)
    assert weights_digest(model) == first == weights_digest(model, known)
    *stamp, digest = entry_of(known, model)
    known.write_text(json.dumps({str(file): [*stamp, "0" * len(digest)]}))
    assert weights_digest(model, known) != first, "the remembered digest is used"
    known.write_bytes(b"\xff damaged")
    for place in (0, 777_777, BIG - 1):
        write_in_place(file, place, b"\1")
        second = weights_digest(model)
        assert second != first and weights_digest(model, known) == second
        first = second
    (model / "config.json").write_text("{ }")
    assert weights_digest(model, known) != first
    assert os.stat(known).st_mode & 0o777 == 0o600 and sorted(os.listdir(tmp_path)) == ["known.json", "model"]


@pytest.mark.parametrize("by", ["tar", "tar --overwrite", "in place"])
def test_other_weights_with_the_same_inode_size_and_time_are_not_taken_for_the_first_ones(model, tmp_path, by):
    """As after a deployment of a reproducible archive: the inode of a deleted file is often the next one."""
    known, archive = tmp_path / "known.json", tmp_path / "b.tar"
    file = model / "a.safetensors"
    file.write_bytes(b"b" * BIG)
    subprocess.run(["tar", "-C", model, "--mtime=@0", "-cf", archive, "."], check=True)
    file.write_bytes(b"a" * BIG)
    os.utime(file, (0, 0))
    time.sleep(0.02)
    first = weights_digest(model, known)
    if by == "in place":
        write_in_place(file, 0, b"b" * BIG)
    else:
        if by == "tar":
            file.unlink()
        subprocess.run(["tar", "-C", model, *by.split()[1:], "-xf", archive], check=True)
    assert file.stat().st_mtime == 0 or by == "in place"
    assert weights_digest(model, known) == weights_digest(model) != first


def test_bytes_are_compared_where_a_file_system_has_no_times(model, tmp_path):
    """A read-only image has the same times, inodes and sizes for two fine-tunes."""
    known = tmp_path / "known.json"
    first = weights_digest(model, known)
    of_first = entry_of(known, model)
    write_in_place(model / "a.safetensors", 1 << 20, b"b" * (BIG // 10))
    known.unlink()
    second = weights_digest(model, known)
    times = entry_of(known, model)[0]
    known.write_text(json.dumps({str(model / "a.safetensors"): [times, *of_first[1:]]}))
    assert weights_digest(model, known) == second != first


def test_a_file_that_has_just_changed_is_not_remembered(model, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", 5)
    known = tmp_path / "known.json"
    weights_digest(model, known)
    assert not known.exists()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_those_that_the_index_names(tmp_path, kind):
    (tmp_path / "shards").mkdir()
    shards = [tmp_path / "shards" / f"{number}.{kind}" for number in range(2)]
    for shard in shards:
        shard.write_bytes(b"a" * 100)
    index = tmp_path / f"model.{kind}.index.json"
    names = {f"layer {number}": f"shards/{shard.name}" for number, shard in enumerate(shards)}
    index.write_text(json.dumps({"weight_map": names}))
    (tmp_path / "training_args.bin").write_bytes(b"x")
    seen = {weights_digest(tmp_path)}
    shards[1].write_bytes(b"a" * 99 + b"b")
    seen.add(weights_digest(tmp_path))
    index.write_text(json.dumps({"weight_map": {**names, "layer 1": "shards/0." + kind}}))
    seen.add(weights_digest(tmp_path))
    assert len(seen) == 3
    for damaged in (b"\xff", b"[]", b'{"weight_map": [1]}', b'{"weight_map": {"a": 1}}'):
        index.write_bytes(damaged)
        seen.add(weights_digest(tmp_path))
    assert len(seen) == 7
    (tmp_path / "training_args.bin").unlink()
    with refuses(ValueError, "no weights"):
        weights_digest(tmp_path)


def test_a_directory_with_an_adapter_is_refused(model):
    """transformers loads the base model that the adapter names, and not the weights beside it."""
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with refuses(ValueError, "adapter_config.json"):
        weights_digest(model)


@pytest.mark.parametrize("fault", ["directory", "mode", "link", "owner"])
def test_a_memory_that_another_user_can_change_is_not_believed(model, tmp_path, fault):
    folder, known = tmp_path / "store", tmp_path / "store" / "weights.json"
    folder.mkdir(mode=0o700)
    first = weights_digest(model, known)
    *stamp, digest = entry_of(known, model)
    known.write_text(json.dumps({str(model / "a.safetensors"): [*stamp, "0" * len(digest)]}))
    assert weights_digest(model, known) != first
    if fault == "directory":
        folder.chmod(0o777)
    elif fault == "mode":
        known.chmod(0o666)
    elif fault == "link":
        known.rename(tmp_path / "other.json")
        known.symlink_to(tmp_path / "other.json")
    elif os.geteuid() == 0:
        os.chown(known, 65534, 65534)
    else:
        pytest.skip("only root can give a file to another user")
    assert weights_digest(model, known) == first
    folder.chmod(0o700)
    assert sorted(os.listdir(folder)) == ["weights.json"]


def test_a_memory_that_cannot_be_written_is_no_error(model, tmp_path):
    known = tmp_path / "weights.json"
    known.mkdir()  # nothing can replace it
    assert weights_digest(model, known) == weights_digest(model)
    assert os.listdir(tmp_path / "weights.json") == [] and sorted(os.listdir(tmp_path)) == ["model", "weights.json"]
