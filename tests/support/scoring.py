"""Rewards of responses, asked for at the same time."""

import asyncio


def rewards_of(scorer, row, responses, start=False):
    """The rewards of responses to one row. The scorer is closed."""
    return rewards_of_pairs(scorer, [(row, response) for response in responses], start)


def rewards_of_pairs(scorer, pairs, start=False):
    async def run():
        try:
            if start:
                await scorer.start()
            return await asyncio.gather(*(scorer.score(row, response) for row, response in pairs))
        finally:
            await scorer.close()

    return asyncio.run(run())
