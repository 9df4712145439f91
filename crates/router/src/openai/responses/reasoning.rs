//! How many of an answer's tokens are reasoning.

use tasuki_text::Detokenizer;

/// Counts the tokens up to the mark that ends reasoning, one by one: however an answer is cut into
/// pieces, the count is the same.
#[derive(Debug)]
pub struct ReasoningTokens {
    /// `None`: the mark was seen, or none is looked for.
    open: Option<Open>,
    count: u64,
}

#[derive(Debug)]
struct Open {
    detokenizer: Detokenizer,
    end: &'static str,
    /// The text's last bytes, as many as the mark may have begun in.
    tail: String,
}

impl ReasoningTokens {
    /// `end`: the mark, which the detokenizer must not skip.
    pub fn new(detokenizer: Detokenizer, end: Option<&'static str>) -> Self {
        let open = end.map(|end| Open {
            detokenizer,
            end,
            tail: String::new(),
        });
        Self { open, count: 0 }
    }

    /// Takes the answer's next tokens.
    pub fn push(&mut self, tokens: &[u32]) {
        for token in tokens {
            let Some(open) = &mut self.open else {
                return;
            };
            self.count += 1;
            if open.ends_with(*token) {
                self.open = None;
            }
        }
    }

    /// Those up to the mark, or all where none came.
    pub fn count(&self) -> u64 {
        self.count
    }
}

impl Open {
    fn ends_with(&mut self, token: u32) -> bool {
        self.tail.push_str(&self.detokenizer.push(&[token]));
        if self.tail.contains(self.end) {
            return true;
        }
        let mut kept = self.tail.len().saturating_sub(self.end.len());
        while !self.tail.is_char_boundary(kept) {
            kept -= 1;
        }
        self.tail.drain(..kept);
        false
    }
}
