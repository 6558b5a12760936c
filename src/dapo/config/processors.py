"""Settings, of Transformers and other programs, that change the distribution which tokens are sampled from.

None of them is a key here: the log-probabilities recorded would not be those of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GENERATION_CONFIG: Mapping[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "typical_p"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    "watermarking_config": None,
}
"""Those that a model's generation config may hold, each with the value that does nothing."""

TRUNCATIONS = frozenset(
    {
        *("typical_p", "epsilon_cutoff", "eta_cutoff", "tfs", "tfs_z", "top_a", "top_n_sigma", "xtc_threshold"),
        *("xtc_probability", "mirostat", "mirostat_tau", "mirostat_eta", "mirostat_mode", "dynatemp_range"),
    }
)
"""Those that leave tokens out, or change the temperature, as a response goes."""

PROCESSORS = (
    frozenset(
        {
            *GENERATION_CONFIG,
            *("presence_penalty", "frequency_penalty", "logits_bias", "logit_bias", "allowed_token_ids"),
            *("logits_processor", "logits_processors", "bad_words", "min_tokens"),
            *("guided_decoding", "guided_regex", "guided_json", "guided_choice", "guided_grammar"),
        }
    )
    - TRUNCATIONS
)
"""Those that change the logits, by what came before or by the user's wish."""
