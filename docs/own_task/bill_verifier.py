from verl_ext.reward.maths.extraction import extract_answer
from verl_ext.reward.score import Score


class BillVerifier:
    def __init__(self, config):
        pass

    async def verify(self, response_text, ground_truth, sample):
        answer = extract_answer(response_text) or ""
        right = answer.strip() == ground_truth
        return Score(float(right), answer, "correct" if right else "wrong", "bill")
