from verl_ext.reward.maths.extraction import extract_answer
from verl_ext.reward.score import Score


class BillVerifier:
    def __init__(self, config): ...

    async def verify(self, response_text, ground_truth, sample):
        answer = extract_answer(response_text)
        if answer is None:
            return Score(0.0, "", "no_answer", "bill")
        return Score.graded(float(answer.strip() == ground_truth), answer, "bill")
