"""scikit-learn: a classifier behind a scaler, fitted to made-up data."""

from __future__ import annotations

from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def use(rank: int) -> float:
    values, labels = make_classification(n_samples=300, n_features=20, random_state=rank)
    found = make_pipeline(StandardScaler(), LogisticRegression()).fit(values, labels)
    score: float = found.score(values, labels)
    assert score > 0.5
    return score
