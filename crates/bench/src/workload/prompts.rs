//! Prompts of the user's own, from a JSONL file. A line has one of `prompt`
//! (text), `prompt_token_ids` and `messages`, and perhaps `output_tokens`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Making;
use super::lines::read_lines;
use crate::error::PlanError;
use crate::plan::{Api, Planned, Prompt, Workload};
use crate::tokens::Counted;

/// Parameters of the workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptsSettings {
    pub file: PathBuf,
    /// For lines that do not say.
    pub output_tokens: u32,
}

#[derive(Debug, Deserialize)]
struct Line {
    prompt: Option<String>,
    prompt_token_ids: Option<Vec<u32>>,
    messages: Option<Vec<Message>>,
    #[serde(alias = "max_tokens")]
    output_tokens: Option<u32>,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: String,
}

/// See the module.
#[derive(Debug)]
pub struct Prompts {
    exact_output: bool,
    prompts: std::vec::IntoIter<(Counted, u32)>,
    next_index: usize,
    total: usize,
}

impl Prompts {
    /// Reads the file; `requests` limits how many of its lines are sent.
    ///
    /// # Errors
    /// [`PlanError::File`], [`PlanError::Line`]; [`PlanError::Empty`] for a file
    /// without a prompt, or with fewer than wanted.
    pub fn read(
        making: Making,
        settings: &PromptsSettings,
        requests: Option<usize>,
    ) -> Result<Self, PlanError> {
        let wanted = "a line is a JSON object with prompt, prompt_token_ids or messages";
        let mut prompts = read_lines(&settings.file, wanted, |line: Line| {
            let output_tokens = line.output_tokens.unwrap_or(settings.output_tokens);
            if output_tokens == 0 {
                return Err("output_tokens is 0; at least 1 is needed".to_owned());
            }
            let prompt = prompt(&making, line)?;
            Ok((making.maker.counted(prompt), output_tokens))
        })?;
        let wanted = requests.unwrap_or(1);
        if prompts.len() < wanted {
            return Err(PlanError::Empty {
                path: settings.file.clone(),
                within: format!("number {}, of {wanted} wanted", prompts.len() + 1),
                remedy: "add prompts or lower --num-requests (a prompt sent twice would be \
                         answered from the prefix cache)",
            });
        }
        prompts.truncate(requests.unwrap_or(usize::MAX));
        Ok(Self {
            exact_output: making.exact_output,
            total: prompts.len(),
            prompts: prompts.into_iter(),
            next_index: 0,
        })
    }
}

fn prompt(making: &Making, line: Line) -> Result<Prompt, String> {
    match (
        line.prompt,
        line.prompt_token_ids,
        line.messages,
        making.maker.api(),
    ) {
        (Some(text), None, None, _) => Ok(making.maker.first(text)),
        (None, Some(tokens), None, Api::Completions) => Ok(Prompt::Tokens(tokens)),
        (None, None, Some(messages), Api::Chat) => {
            let messages = messages.into_iter().map(|m| (m.role, m.content));
            Ok(Prompt::Messages(messages.collect()))
        }
        (None, Some(_), None, Api::Chat) => Err(
            "prompt_token_ids cannot be sent to /v1/chat/completions; use /v1/completions"
                .to_owned(),
        ),
        (None, None, Some(_), Api::Completions) => {
            Err("messages cannot be sent to /v1/completions; use /v1/chat/completions".to_owned())
        }
        _ => Err("one of prompt, prompt_token_ids and messages is needed".to_owned()),
    }
}

impl Workload for Prompts {
    fn next(&mut self) -> Option<Planned> {
        let ((prompt, input_tokens), output_tokens) = self.prompts.next()?;
        let index = self.next_index;
        self.next_index += 1;
        Some(Planned {
            index,
            prompt,
            input_tokens,
            output_tokens,
            exact_output: self.exact_output,
            at: None,
        })
    }

    fn total(&self) -> Option<usize> {
        Some(self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::{Prompts, PromptsSettings};
    use crate::error::PlanError;
    use crate::plan::{Api, Planned, Prompt};
    use crate::tokens::PromptMaker;
    use crate::workload::Making;
    use crate::workload::testing::{all, file, making};

    fn read(
        content: &str,
        making: Making,
        wanted: Option<usize>,
    ) -> Result<Vec<Planned>, PlanError> {
        let file = file(content);
        let settings = PromptsSettings {
            file: file.path().to_owned(),
            output_tokens: 32,
        };
        Ok(all(&mut Prompts::read(making, &settings, wanted)?))
    }

    fn chats() -> Making {
        Making {
            maker: PromptMaker::words(Api::Chat, 3),
            ..making(0, 3)
        }
    }

    #[test]
    fn lines_of_every_form() {
        let lines = "{\"prompt\": \"as it is\", \"output_tokens\": 7}\n\n\
                     {\"prompt_token_ids\": [5, 6, 7], \"max_tokens\": 8}\n";
        let planned = read(lines, making(0, 3), None).unwrap();
        assert_eq!(planned[0].prompt, Prompt::Text("as it is".to_owned()));
        assert!(
            planned[0]
                .input_tokens
                .is_some_and(|n| (1..=8).contains(&n))
        );
        assert_eq!(planned[1].prompt, Prompt::Tokens(vec![5, 6, 7]));
        assert_eq!(planned[1].input_tokens, Some(3));
        let outputs: Vec<u32> = planned.iter().map(|p| p.output_tokens).collect();
        assert_eq!(outputs, [7, 8]);

        let lines =
            "{\"messages\": [{\"role\": \"system\", \"content\": \"a\"}]}\n{\"prompt\": \"b\"}";
        let planned = read(lines, chats(), Some(2)).unwrap();
        let message = |role: &str, text: &str| Prompt::Messages(vec![(role.into(), text.into())]);
        assert_eq!(planned[0].prompt, message("system", "a"));
        assert_eq!(planned[1].prompt, message("user", "b"));
        assert_eq!(
            (planned[1].output_tokens, planned[1].input_tokens),
            (32, None)
        );
    }

    #[test]
    fn what_cannot_be_sent_is_named_with_its_line() {
        let said = |lines: &str, making| read(lines, making, None).unwrap_err().to_string();
        let text = said("{\"prompt\": \"a\"}\n{\"messages\": []}", making(0, 3));
        assert!(
            text.contains("line 2") && text.contains("/v1/chat/completions"),
            "{text}"
        );
        let text = said("{\"prompt_token_ids\": [1]}", chats());
        assert!(
            text.contains("line 1") && text.contains("/v1/completions"),
            "{text}"
        );
        let text = said("{\"prompt\": \"a\"}\n{\"prompt\": 3}", making(0, 3));
        assert!(
            text.contains(
                ", line 2: invalid type: integer `3`, expected a string at column 12; a line is a JSON"
            ),
            "{text}"
        );
        for line in ["{}", "{\"prompt\": \"a\", \"prompt_token_ids\": [1]}"] {
            assert!(said(line, making(0, 3)).contains("one of prompt"), "{line}");
        }
        assert!(
            said("{\"prompt\": \"a\", \"max_tokens\": 0}", making(0, 3)).contains("at least 1")
        );
        assert!(said("", making(0, 3)).contains("no request"));
    }

    #[test]
    fn a_short_file_is_not_sent_twice() {
        let lines = "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\"}\n";
        assert_eq!(read(lines, making(0, 3), Some(2)).unwrap().len(), 2);
        let error = read(lines, making(0, 3), Some(4)).unwrap_err().to_string();
        assert!(
            error.contains("of 4 wanted") && error.contains("--num-requests"),
            "{error}"
        );
    }
}
