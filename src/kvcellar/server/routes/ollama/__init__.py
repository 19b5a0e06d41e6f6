"""Ollama's API, as far as its clients ask for models and answers; streams are lines of JSON."""

from fastapi import APIRouter

from kvcellar.server.routes.ollama import answers, models

router = APIRouter(tags=["Ollama"])
router.include_router(models.router)
router.include_router(answers.router)

__all__ = ["router"]
