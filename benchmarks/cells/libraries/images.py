"""PIL: pictures are drawn, turned, made smaller, and handed to torch."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter


def use(rank: int) -> float:
    pictures = []
    for number in range(8):
        picture = Image.new("RGB", (256, 256), "white")
        ImageDraw.Draw(picture).ellipse((20, 20, 100 + number, 200), fill=(rank, 80, 160))
        picture = picture.rotate(10 * number).filter(ImageFilter.GaussianBlur(2)).resize((64, 64))
        pictures.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    batch = torch.stack(pictures).float() / 255  # [8, 3, 64, 64]
    return torch.nn.functional.avg_pool2d(batch, 8).mean().item()
