"""An agent as it stands in production: it knows the OpenAI SDK's client, and nothing of training."""

from openai import AsyncOpenAI


async def handle(ticket: str, client: AsyncOpenAI) -> tuple[str, str]:
    """The team that a support ticket goes to, and whether it is urgent."""
    history = [{"role": "user", "content": ticket}]
    team = await ask(client, history)
    history += [{"role": "assistant", "content": team}, {"role": "user", "content": "urgent?"}]
    return team, await ask(client, history)


async def ask(client: AsyncOpenAI, history: list[dict[str, str]]) -> str:
    reply = await client.chat.completions.create(model="policy", messages=history, max_tokens=10)
    return reply.choices[0].message.content or ""
