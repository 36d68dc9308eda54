"""An agent as it stands in production: it knows the OpenAI SDK, a base URL and a key, and nothing of training."""

from openai import AsyncOpenAI


async def handle(ticket: str, base_url: str, api_key: str) -> tuple[str, str]:
    """The team that a support ticket goes to, and whether it is urgent."""
    history = [{"role": "user", "content": ticket}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        team = await ask(client, history)
        history += [{"role": "assistant", "content": team}, {"role": "user", "content": "urgent?"}]
        return team, await ask(client, history)


async def ask(client: AsyncOpenAI, history: list[dict[str, str]]) -> str:
    reply = await client.chat.completions.create(model="policy", messages=history, max_tokens=10)
    return reply.choices[0].message.content or ""
