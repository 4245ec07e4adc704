import pytest

from tools.command_line import figure_folder


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["draw.py", *arguments])
    return figure_folder("Draws.")


def test_a_folder_of_figures_is_made(monkeypatch, tmp_path):
    folder = tmp_path / "new" / "figures"
    assert call(monkeypatch, str(folder)) == folder and folder.is_dir()


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--hlep", 2)])
def test_a_flag_is_not_a_folder(monkeypatch, tmp_path, flag, code):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        call(monkeypatch, flag)
    assert exit_.value.code == code and not list(tmp_path.iterdir())
