//! Runs the generations of one request and merges their events, as text, in
//! the order in which they come. Dropping it aborts whatever still runs.

use std::sync::Arc;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use tasuki_text::{Detokenizer, ModelText};

use super::choice::{Beginning, ChoiceText, Piece};
use super::usage::{Usage, merge};
use crate::openai::completions::echo::Echo;
use crate::openai::generator::Generator;
use crate::openai::request::delivery::Delivery;
use tasuki_core::FailureKind;

use crate::serve::api::{
    Account, Arrival, Event, Finish, Generating, Generation, ServeError, Timings,
};

/// Tokens at the prompt's end that tell a detokenizer where it stands (some
/// tokenizers drop a space at the beginning of a text).
const CONTEXT_TOKENS: usize = 8;

/// One prompt of a request.
pub struct Job {
    pub generation: Generation,
    pub echo: Option<Echo>,
    /// The client asked for no output at all.
    pub muted: bool,
    /// The output goes on in the prompt's text, as in a completion.
    pub continues_prompt: bool,
}

/// Something new for the client.
#[derive(Debug)]
pub struct Output {
    /// Of the choice, counted over all prompts.
    pub index: usize,
    /// The first piece of its choice.
    pub first: bool,
    pub piece: Piece,
}

/// What is known when everything has ended.
#[derive(Debug, Clone)]
pub struct Summary {
    pub usage: Usage,
    pub timings: Timings,
}

struct PromptOutputs {
    tokens: Arc<[u32]>,
    echo: Option<Echo>,
    choices: Vec<ChoiceText>,
    begun: Vec<bool>,
    /// Of the choices that ended, in that order.
    finishes: Vec<Finish>,
    /// Once all choices have ended.
    timings: Option<Timings>,
    /// Until then.
    account: Arc<Account>,
}

struct Received {
    prompt: usize,
    generating: Generating,
    event: Option<Event>,
}

pub struct Outputs {
    waiting: FuturesUnordered<BoxFuture<'static, Received>>,
    prompts: Vec<PromptOutputs>,
    choices_per_prompt: usize,
}

impl Outputs {
    /// Starts every job.
    pub fn start(
        generator: &dyn Generator,
        text: &ModelText,
        delivery: &Delivery,
        jobs: Vec<Job>,
        arrival: &Arrival,
    ) -> Self {
        let waiting = FuturesUnordered::new();
        let mut prompts = Vec::with_capacity(jobs.len());
        for (prompt, job) in jobs.into_iter().enumerate() {
            prompts.push(PromptOutputs::new(text, delivery, &job));
            prompts[prompt].echo = job.echo;
            let generating = generator.generate(job.generation, arrival.clone());
            prompts[prompt].account = Arc::clone(&generating.account);
            waiting.push(receive(prompt, generating));
        }
        Self {
            waiting,
            prompts,
            choices_per_prompt: delivery.n as usize,
        }
    }

    /// The next piece of any choice; `None` when all have ended. After an
    /// error nothing follows, and what still ran is aborted.
    pub async fn next(&mut self) -> Option<Result<Output, ServeError>> {
        while let Some(received) = self.waiting.next().await {
            let Received {
                prompt: index,
                generating,
                event,
            } = received;
            let prompt = &mut self.prompts[index];
            match event {
                Some(Event::PromptLogprobs(logprobs)) => {
                    if let Some(echo) = &mut prompt.echo {
                        echo.set_logprobs(logprobs);
                    }
                    self.waiting.push(receive(index, generating));
                }
                Some(Event::Tokens {
                    choice,
                    tokens,
                    logprobs,
                    finish,
                }) => {
                    let output = prompt.take(choice as usize, &tokens, logprobs, finish);
                    let ended_here = output
                        .as_ref()
                        .is_some_and(|(_, piece)| piece.finish.is_some() && finish.is_none());
                    if ended_here {
                        generating.stop(choice);
                    }
                    self.waiting.push(receive(index, generating));
                    if let Some((first, piece)) = output {
                        return Some(Ok(Output {
                            index: index * self.choices_per_prompt + choice as usize,
                            first,
                            piece,
                        }));
                    }
                }
                Some(Event::Done(timings)) if prompt.is_finished() => {
                    prompt.timings = Some(*timings)
                }
                // Frames are of requests that are not tokens, which are not served here.
                Some(Event::Done(_) | Event::Frame { .. }) | None => {
                    return self.fail(ServeError::Failed {
                        kind: FailureKind::Device,
                        message: "The generation ended before all its choices did.".to_owned(),
                    });
                }
                // The client has all of it; only the timings are missing.
                Some(Event::Failed(_)) if prompt.is_finished() => {}
                Some(Event::Failed(error)) => return self.fail(error),
            }
        }
        None
    }

    fn fail(&mut self, error: ServeError) -> Option<Result<Output, ServeError>> {
        self.waiting.clear();
        Some(Err(error))
    }

    /// Tokens so far, and the timings of the prompts that have ended.
    pub fn summary(&self) -> Summary {
        let timings = merge(
            self.prompts
                .iter()
                .filter_map(|p| p.timings.clone())
                .collect(),
        );
        let prompt_tokens: usize = self.prompts.iter().map(|p| p.tokens.len()).sum();
        let choices = self.prompts.iter().flat_map(|p| &p.choices);
        let output_tokens: usize = choices.map(ChoiceText::output_tokens).sum();
        Summary {
            usage: Usage::new(
                prompt_tokens as u64,
                output_tokens as u64,
                timings.cached_prompt_tokens.into(),
            ),
            timings,
        }
    }

    /// The timings of all prompts, of those that have not ended as far as known.
    pub fn known_timings(&self) -> Timings {
        let known = |prompt: &PromptOutputs| match &prompt.timings {
            Some(timings) => timings.clone(),
            None => prompt.account.read(),
        };
        merge(self.prompts.iter().map(known).collect())
    }

    /// Why the choices ended that did.
    pub fn finishes(&self) -> Vec<Finish> {
        let prompts = self.prompts.iter();
        prompts.flat_map(|p| p.finishes.iter().copied()).collect()
    }

    /// The prompt's tokens of a choice.
    pub fn prompt_tokens(&self, index: usize) -> &[u32] {
        &self.prompts[index / self.choices_per_prompt].tokens
    }

    /// Of a choice's prompt, once the prompt's choices have ended.
    pub fn cached_tokens(&self, index: usize) -> Option<u32> {
        let timings = &self.prompts[index / self.choices_per_prompt].timings;
        timings.as_ref().map(|t| t.cached_prompt_tokens)
    }

    /// Choices over all prompts.
    pub fn choices(&self) -> usize {
        self.prompts.len() * self.choices_per_prompt
    }
}

fn receive(prompt: usize, mut generating: Generating) -> BoxFuture<'static, Received> {
    Box::pin(async move {
        let event = generating.next().await;
        Received {
            prompt,
            generating,
            event,
        }
    })
}

impl PromptOutputs {
    fn new(text: &ModelText, delivery: &Delivery, job: &Job) -> Self {
        let tokens = &job.generation.prompt;
        let beginning = Beginning {
            echoed_chars: job.echo.as_ref().map_or(0, Echo::chars),
            muted: job.muted,
        };
        let context = &tokens[tokens.len().saturating_sub(CONTEXT_TOKENS)..];
        let choices = (0..delivery.n).map(|_| {
            let mut detokenizer = Detokenizer::new(text, delivery.skip_special_tokens)
                .keeping(Arc::clone(&delivery.kept_special_tokens));
            if job.continues_prompt {
                detokenizer = detokenizer.after(context);
            }
            ChoiceText::new(detokenizer, delivery, beginning)
        });
        Self {
            tokens: Arc::clone(tokens),
            echo: None,
            choices: choices.collect(),
            begun: vec![false; delivery.n as usize],
            finishes: Vec::new(),
            timings: None,
            account: Arc::default(),
        }
    }

    /// `None` for what comes after a choice's end.
    fn take(
        &mut self,
        choice: usize,
        tokens: &[u32],
        logprobs: Vec<tasuki_flow::TokenLogprob>,
        finish: Option<Finish>,
    ) -> Option<(bool, Piece)> {
        let state = self.choices.get_mut(choice)?;
        if state.is_finished() {
            return None;
        }
        let mut piece = state.push(tokens, logprobs, finish);
        self.finishes.extend(piece.finish);
        let first = !std::mem::replace(&mut self.begun[choice], true);
        if let Some(echo) = self.echo.as_ref().filter(|_| first) {
            let mut whole = echo.piece();
            whole.append(piece);
            piece = whole;
        }
        Some((first, piece))
    }

    fn is_finished(&self) -> bool {
        self.choices.iter().all(ChoiceText::is_finished)
    }
}
