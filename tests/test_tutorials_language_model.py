"""What the tutorials on language models share: files, tokens, batches, the loop and the held-out loss; and bugs planted in them."""
from functools import partial

import pytest
import torch
from torch import nn

from workbook.runs import Run
from workbook import language_model
from helpers import planted, unchanged

pytest.importorskip("tokenizers")
TEXTS = ["def f(x):\n    return x + 1\n" * 4, "class Größe:\n    pass  # ☃\n" * 3, "x = 'no end of line'"]


def files_are_read(module, folder):
    "All that can be read is read once, a copy not at all, every third text is held out, and the same come again"
    for i in range(9):
        (folder / f"{i}.py").write_text(f"number = {i}\n" * 10, encoding="utf-8")
    (folder / "latin.py").write_bytes("ä = 1".encode("latin-1"))
    (folder / "copy.py").write_text("number = 4\n" * 10, encoding="utf-8")
    paths = [*sorted(folder.glob("*.py")), folder / "gone.py"]
    train, held = module.read_texts(paths, 10**6, every=3)
    assert (len(train), len(held)) == (6, 3) and len({*train, *held}) == 9
    assert module.read_texts(paths, 10**6, every=3) == (train, held)
    few = module.read_texts(paths, 300, every=3)
    assert sum(map(len, few)) == 3 and set(few[1]) <= set(held), "a smaller text holds out some of the same files"


def library_is_found(module, folder):
    "The library's own files, and none that was installed beside it or tests it"
    found = module.library_files()
    assert len(found) > 100 and any(path.name == "ast.py" for path in found)
    assert not any({"site-packages", "test", "encodings"} & set(path.parts) for path in found)


def texts_come_back(module, folder):
    "Every text is its tokens, also one of characters that were not trained on"
    tokenizer = module.train_tokenizer(TEXTS, 300)
    assert tokenizer.get_vocab_size() == 300 and tokenizer.token_to_id("<file>") == 0
    for text in (*TEXTS, "\t a  b\n\n漢字 <file"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def bytes_are_counted(module, folder):
    "The tokens of a text stand for its bytes, characters of several bytes included, and `<file>` for none"
    tokenizer = module.train_tokenizer(TEXTS, 300)
    sizes = module.bytes_of_tokens(tokenizer)
    assert sizes.shape == (300,) and sizes[0] == 0 and sizes.max() > 4
    for text in (*TEXTS, "\t a  b\n\n漢字"):
        assert sizes[tokenizer.encode(text).ids].sum() == len(text.encode())


def windows_follow_each_other(module, folder):
    "Each file begins with a 0; all tokens stand in the windows, in order, but those left over"
    tokenizer = module.train_tokenizer(TEXTS, 300)
    expected = [i for text in TEXTS for i in [0, *tokenizer.encode(text).ids]]
    data = module.windows(tokenizer, TEXTS, 7)
    assert data.shape == (len(expected) // 7, 7) and data.flatten().tolist() == expected[:len(expected) // 7 * 7]


def batches_are_by_step(module, folder):
    "The same windows for the same step, others for another, all of them in the end"
    data = torch.arange(20).view(10, 2)
    draws = [module.draw_batch(data, 4, step) for step in range(50)]
    assert all(torch.equal(a, module.draw_batch(data, 4, step)) for step, a in enumerate(draws))
    assert len({str(a) for a in draws}) > 40 and len({*torch.cat(draws)[:, 0].tolist()}) == 10


def held_out_loss_is_a_mean(module, folder):
    "Over windows, whatever is left for the last part"
    data = torch.arange(14.0).view(7, 2)
    found = module.mean_loss(nn.Identity(), data, lambda model, part: model(part).mean(), 3)
    assert found == pytest.approx(data.mean().item())


def rate_rises_and_falls(module, folder):
    "A tenth of the steps to warm up, then down to a tenth of the rate"
    parts, rates = module.trained_by_adamw(nn.Linear(1, 1), 2.0, 100), []
    for _ in range(100):
        rates.append(parts["optimizer"].param_groups[0]["lr"])
        parts["optimizer"].step()
        parts["schedule"].step()
    assert rates[0] == pytest.approx(0.2) and 1.9 < max(rates) <= 2.0 and rates.index(max(rates)) in (9, 10)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.2, rel=0.05)


def loop_trains(module, folder):
    "The loss falls by steps of the gradient of each batch alone; what was logged is the loss of each step"
    torch.manual_seed(0)
    x, model, seen = torch.randn(64, 3), nn.Linear(3, 1), []
    model.weight.data.fill_(5.0)
    loss, run = (lambda model, x: (model(x)[:, 0] - x.sum(1)).square().mean()), Run("toy", folder)
    module.train(run, **module.trained_by_adamw(model, 0.3, 40), loss=loss, batch=partial(module.draw_batch, x, 16), steps=40,
                 after=lambda step: seen.append((step, model.weight.grad.norm())))
    assert [step for step, _ in seen] == [*range(1, 41)] and loss(model, x) < 0.05
    assert [step for step, _ in run.curve["loss"]] == [*range(40)] and run.curve["loss"][0][1] > 20
    assert seen[0][1] > 0.5 and all(norm < 1.01 for _, norm in seen), "clipped"
    assert seen[-1][1] < 0.5, "not added up"


CHECKS = (files_are_read, texts_come_back, bytes_are_counted, windows_follow_each_other, batches_are_by_step, held_out_loss_is_a_mean,
          rate_rises_and_falls, loop_trains, library_is_found)


@pytest.mark.parametrize("check", CHECKS)
def test_tutorials_share(check, tmp_path):
    check(language_model, tmp_path)


BUGS = {
    "held out and trained on": ("for i, text in enumerate(texts) if i % every]", "for i, text in enumerate(texts)]"),
    "a copy is read again": ("found[text] = None", "found[text, total] = None"),
    "one bad file stops all": ("except (OSError, UnicodeDecodeError)", "except OSError"),
    "what was installed is read": ("if not others &", "if others or others &"),
    "spaces before a text": ("add_prefix_space=False", "add_prefix_space=True"),
    "unknown characters are lost": ("initial_alphabet=by_bytes.alphabet(), ", ""),
    "a file's beginning has bytes": ("torch.tensor([0, *map(len, texts)])", "torch.tensor([6, *map(len, texts)])"),
    "bytes of the next token": ("(tokenizer.id_to_token(i) for i in range(1, ", "(tokenizer.id_to_token(i - 1) for i in range(1, "),
    "files run together": ("(0, *text.ids)", "text.ids"),
    "one batch for all steps": ("manual_seed(step)", "manual_seed(0)"),
    "parts weigh the same": (".item() * len(part)", ".item() * size"),
    "no warm-up": ("min((step + 1) / warm, ", "min(1.0, "),
    "gradients add up": ("        optimizer.zero_grad()\n", ""),
    "no schedule": ("        schedule.step()\n", ""),
    "no clipping": ("        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
}


def first_fault(module, folder):
    "What the first check says that finds something"
    for check in CHECKS:
        (place := folder / check.__name__).mkdir()
        try:
            check(module, place)
        except Exception as error:  # a planted bug may break anything
            assert "is not defined" not in str(error), error
            return f"{check.__name__}: {error!r}"


@pytest.mark.thorough
def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(language_model, tmp_path, *unchanged(BUGS.values())), tmp_path) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert first_fault(planted(language_model, tmp_path, *BUGS[bug]), tmp_path), f"no check notices that {bug}"
