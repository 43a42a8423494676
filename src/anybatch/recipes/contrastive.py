"""`contrastive`: two encoders learn which halves of handwritten digits belong together, in seconds on a CPU.

One encoder sees the even columns of an image, the other encoder the odd columns. The loss compares each half with all
halves of the effective batch, so it needs `ab.joint`: a micro-batch has fewer negatives, which makes the task easier.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import anybatch as ab
from anybatch.recipes.digits import Digits, scikit_learn_folder

Vectors = tuple[Float[Tensor, "image 32"], Float[Tensor, "image 32"]]


def contrastive() -> ab.Job:
    """Return the job: 1,437 training images; evaluated by retrieval of the other half among 360 held-out images."""
    scikit_learn_folder("contrastive")
    return ab.Job(
        model=Encoders,
        optimizer=torch.optim.AdamW,
        loss=ab.joint(encode, loss),
        dataset=lambda: Digits("train", shifted=True),
        evaluate=ab.Evaluation(
            dataset=lambda: Digits("held_out"), metric=ab.joint(encode, retrieval), effective_batch_size=360
        ),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
        defaults=ab.RunConfig(effective_batch_size=256, epochs=30, learning_rate=3e-3),
    )


class Encoders(nn.Module):
    """Two perceptrons that embed half-images, and the temperature of their similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = (
            nn.Sequential(
                nn.Flatten(), nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32)
            )
            for _ in range(2)
        )
        # CLIP's initial temperature; its logarithm is learned, which keeps the factor positive.
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())


def encode(model: Encoders, batch: dict[str, Tensor]) -> Vectors:
    """Return the normalised embeddings of the even and of the odd columns of each image."""
    even, odd = batch["image"][..., ::2], batch["image"][..., 1::2]
    return F.normalize(model.even(even), dim=1), F.normalize(model.odd(odd), dim=1)


def loss(model: Encoders, vectors: Vectors) -> Float[Tensor, ""]:
    """Return the symmetric cross-entropy of finding the other half among all images.

    Source: Radford et al. 2021, arXiv 2103.00020, figure 3.
    """
    even, odd = vectors
    logits = model.logit_scale.exp() * even @ odd.T
    same_image = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, same_image) + F.cross_entropy(logits.T, same_image)) / 2


def retrieval(_model: Encoders, vectors: Vectors) -> dict[str, Float[Tensor, ""]]:
    """Return the retrieval accuracy in both directions: is the nearest embedding the other half of the same image?"""
    similarities = vectors[0] @ vectors[1].T
    same_image = torch.arange(len(similarities), device=similarities.device)
    is_found = torch.cat([similarities.argmax(axis) == same_image for axis in (0, 1)])
    return {"retrieval_accuracy": is_found.double().mean()}
