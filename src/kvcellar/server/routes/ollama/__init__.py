"""Ollama's API: models, answers and vectors, but no changes; streams are lines of JSON.

Imports answers and schemas as the other protocols do; no other protocol comes in.
"""

from fastapi import APIRouter

from kvcellar.server.routes.ollama import answers, embed, models

router = APIRouter(tags=["Ollama"])
router.include_router(models.router)
router.include_router(answers.router)
router.include_router(embed.router)

__all__ = ["router"]
