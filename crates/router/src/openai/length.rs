//! Refuses texts that are hopelessly long before they are tokenized, which
//! takes seconds for megabytes.

use tasuki_text::ModelText;

use crate::error::ApiError;

/// Normalizers may shorten a text; none of a causal model does so by more.
const NORMALIZER_MARGIN: usize = 4;

/// How long a text may be to be worth tokenizing.
#[derive(Debug, Clone, Copy)]
pub struct TextLimit {
    longest_token_bytes: usize,
}

impl TextLimit {
    pub fn new(text: &ModelText) -> Self {
        let ids = 0..u32::try_from(text.vocab_size()).unwrap_or(u32::MAX);
        let longest = ids.map(|id| text.token_bytes(id).len()).max();
        Self {
            longest_token_bytes: longest.unwrap_or(0).max(1),
        }
    }

    /// # Errors
    /// When no tokenization of `text` can fit `max_model_len` tokens.
    pub fn check(&self, param: &str, text: &str, max_model_len: u32) -> Result<(), ApiError> {
        let limit_bytes = (max_model_len as usize)
            .saturating_mul(self.longest_token_bytes)
            .saturating_mul(NORMALIZER_MARGIN);
        if text.len() <= limit_bytes {
            return Ok(());
        }
        Err(ApiError::Invalid {
            message: format!(
                "{param} has {} bytes of text, far more than fit {max_model_len} tokens, the limit \
                 for prompt and output together.",
                text.len()
            ),
            param: Some(param.to_owned()),
            code: Some("context_length_exceeded"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestModel;

    #[test]
    fn only_what_cannot_fit_is_refused() {
        let limit = TextLimit::new(&TestModel::new().text);
        // The longest token is <|eos|>, of 7 bytes.
        assert_eq!(limit.longest_token_bytes, 7);
        assert!(limit.check("prompt", &"x".repeat(10 * 7 * 4), 10).is_ok());
        let error = limit.check("prompt", &"x".repeat(10 * 7 * 4 + 1), 10);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("281 bytes") && text.contains("10 tokens"));
    }
}
