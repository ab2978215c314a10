"""Agreement of two models' outputs over a whole data set, and where users read it."""

import json

import pytest
import torch
from scipy.stats import spearmanr

from acm_compiler.evaluation.evaluate import evaluate
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.evaluation.wording import evaluation_table
from acm_compiler.runtime.control import FixedK
from acm_compiler.tasks.distance import agreement
from acm_compiler.tasks.embed import Embed, pairwise_spearman
from acm_compiler.tasks.language import CausalLM
from tests.helpers.pictures import OPEN, TASK, picture_batch, picture_model


def test_agreement_is_the_share_of_equal_answers():
    assert agreement(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 3, 0])) == 0.75


def test_spearman_is_scipys_also_with_ties():
    torch.manual_seed(0)
    a, b = torch.randn(40, 5), torch.randn(40, 5)
    a[7:12] = a[7]
    rows, columns = torch.triu_indices(40, 40, 1)
    wanted = spearmanr(*((v.double() @ v.double().T)[rows, columns].numpy() for v in (a, b))).statistic
    assert pairwise_spearman(a, b) == pytest.approx(wanted, abs=1e-9)
    assert pairwise_spearman(a, a) == pytest.approx(1)


def test_spearman_of_very_few_or_very_many_examples():
    torch.manual_seed(0)
    many = torch.randn(1100, 3)
    other = torch.cat([many[:1024], torch.randn(76, 3)])
    assert pairwise_spearman(many, other) == pytest.approx(1), "the first 1,024 are compared"
    assert pairwise_spearman(many[:2], many[:2]) != pairwise_spearman(many[:2], many[:2]), "two make no ranking: nan"


def test_embed_keeps_the_vectors_that_it_judges():
    hidden, mask = torch.randn(2, 4, 8), torch.ones(2, 4)
    kept = Embed().likeness.keep({"last_hidden_state": hidden}, {"attention_mask": mask})
    torch.testing.assert_close(kept, Embed().answer(hidden, mask))


def test_an_evaluation_says_how_often_the_dense_model_answers_the_same():
    model, dense = picture_model(), picture_model()
    with torch.no_grad():
        dense.head.weight.neg_()
        dense.head.bias.neg_()
    batch = picture_batch(12)
    found = evaluate(model, [batch], TASK, budgets=[OPEN, FixedK(4)], dense=dense)
    assert found.metric.likeness == "agreement"
    with torch.no_grad():
        wanted = float((model(batch["image"]).argmax(1) == dense(batch["image"]).argmax(1)).double().mean())
    assert found.fixed[0].likeness == wanted != 1
    assert "agreement" in evaluation_table(found)
    assert Evaluation.from_json(json.dumps(found.as_json())) == found


def test_a_language_models_agreement_is_over_guessed_tokens():
    ids, mask = torch.randint(0, 9, (3, 7)), torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = mask[2, :2] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    logits, others = torch.randn(2, 3, 7, 9)
    likeness = CausalLM().likeness
    kept = likeness.keep({"logits": logits}, batch)
    wanted = [logits[text, s].argmax() for text in range(3) for s in range(6) if mask[text, s] and mask[text, s + 1]]
    assert kept.tolist() == wanted
    same = [k == o for k, o in zip(kept, likeness.keep({"logits": others}, batch), strict=True)]
    assert likeness.compare(kept, likeness.keep({"logits": others}, batch)) == pytest.approx(sum(same) / len(same))


def test_without_a_dense_model_nothing_is_compared():
    found = evaluate(picture_model(), [picture_batch(6)], TASK, budgets=[OPEN])
    assert found.metric.likeness is None and found.budgets[0].likeness is None
    assert "agreement" not in evaluation_table(found)


def test_an_evaluation_of_before_can_still_be_read():
    found = evaluate(picture_model(), [picture_batch(6)], TASK, budgets=[OPEN])
    old = found.as_json()
    del old["metric"]["likeness"], old["budgets"][0]["likeness"]
    assert Evaluation.from_json(json.dumps(old)) == found
