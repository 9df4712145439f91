//! The parts of one answer, whether or not there is something to look for in it.

use super::harmony::Channels;
use super::scanner::{Part, Scanner};

/// Reads one choice's text.
#[derive(Debug, Clone)]
pub enum Reader {
    /// All is content.
    Plain,
    Marks(Scanner),
    Channels(Channels),
}

impl Reader {
    /// Takes the next text; `ended`: it is the last. Returns what is certain by now.
    pub fn read(&mut self, text: String, ended: bool) -> Vec<Part> {
        let mut parts = match self {
            Self::Plain => {
                let content = (!text.is_empty()).then_some(Part::Content(text));
                return Vec::from_iter(content);
            }
            Self::Marks(scanner) => scanner.push(&text),
            Self::Channels(channels) => channels.push(&text),
        };
        if ended {
            parts.extend(match self {
                Self::Plain => Vec::new(),
                Self::Marks(scanner) => scanner.finish(),
                Self::Channels(channels) => channels.finish(),
            });
        }
        parts
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Marks(scanner) => scanner.calls(),
            Self::Channels(channels) => channels.calls(),
        }
    }
}
