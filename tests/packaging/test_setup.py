"""Errors of setup.py on platforms where pagepool cannot be built."""

import importlib.util
import sys
from pathlib import Path

import pytest
from refusals import refuses

SETUP = Path(__file__).parents[2] / "setup.py"
if not SETUP.is_file():
    pytest.skip("needs setup.py of a checkout", allow_module_level=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("platform", "darwin", (64, "Linux", "darwin")), ("maxsize", 2**31 - 1, (64, "32-bit"))],
)
def test_a_platform_without_support_gets_one_sentence(monkeypatch, name, value, words):
    spec = importlib.util.spec_from_file_location("pagepool_setup", SETUP)
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    setup.check_platform()
    monkeypatch.setattr(sys, name, value)
    with refuses(SystemExit, *words):
        setup.check_platform()


def test_a_release_with_a_missing_wheel_an_undated_changelog_or_another_tag_is_refused():
    spec = importlib.util.spec_from_file_location("check_release", SETUP.parent / ".ci/check_release.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    names = ["pagepool-1.2.3.tar.gz"]
    for python in release.PYTHONS:
        names.append(f"pagepool-1.2.3-{python}-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl")
        names.append(f"pagepool-1.2.3-{python}-manylinux_2_28_aarch64.whl")
    dated, urls = "## [1.2.3] - 2030-01-02\n", "[project.urls]\n"
    assert list(release.problems("v1.2.3", names, "1.2.3", dated, urls)) == []
    assert "tag" in next(release.problems("v1.2.4", names, "1.2.3", dated, urls))
    assert "CHANGELOG" in next(release.problems("v1.2.3", names, "1.2.3", "## [1.2.3] - unreleased\n", urls))
    assert "cp314-cp314t" in next(release.problems("v1.2.3", names[:-1], "1.2.3", dated, urls))
    assert "urls" in next(release.problems("v1.2.3", names, "1.2.3", dated, ""))
    assert "other.whl" in next(release.problems("v1.2.3", [*names, "other.whl"], "1.2.3", dated, urls))
