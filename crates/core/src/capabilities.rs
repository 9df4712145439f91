//! What a worker can do, as declared by the link to it.
//!
//! Decisions read these declarations. Nothing asks which engine a worker is.

/// How a prefill worker's KV gets to a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HandoffKind {
    /// Both legs start at once, and the two workers settle the handoff between them.
    Concurrent,
    /// The prefill leg runs to its end and yields an opaque ticket; the decode leg starts
    /// with it. A ticket can be used once.
    Ticket,
    /// Not at all.
    None,
}

/// Which leg of a split request streams the first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FirstToken {
    /// The decode leg may repeat it.
    Prefill,
    /// Output of the prefill leg is not for the client.
    Decode,
}

/// How the position of a run of tokens is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Positions {
    /// The worker reports it, so that runs may be repeated or overtake one another.
    Exact,
    /// A leg's runs arrive once each, in order, from the first token that the leg was asked for.
    Counted,
}

/// How far a worker's role decides what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RoleUse {
    /// As the policy says: by cost, the role is a small discount.
    Discount,
    /// It does another role's work only where nobody else can.
    First,
    /// It does nothing else, whatever the policy.
    Only,
}

impl RoleUse {
    /// What a request costs more, in seconds, on a worker whose role does not ask for it: more
    /// than any load.
    pub fn other_role_s(self) -> f64 {
        match self {
            Self::Discount => 0.0,
            Self::First | Self::Only => 1e6,
        }
    }
}

/// What a worker takes and gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Payload {
    /// Token ids: the router has the model's text side.
    Tokens,
    /// Requests and answers as clients have them: the worker has the text side.
    Opaque,
}

/// The capabilities of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    pub handoff: HandoffKind,
    pub first_token: FirstToken,
    pub positions: Positions,
    /// Goes on from tokens that another worker produced.
    pub resumes: bool,
    /// A running prefill leg can hand over to another decode worker.
    pub retargets: bool,
    /// The choices of one prompt can share a handoff.
    pub splits_choices: bool,
    pub role_use: RoleUse,
    pub payload: Payload,
    /// Reports its load. Otherwise only our own requests there are known.
    pub reports_load: bool,
    /// Reports what its prefix cache stores and drops. Otherwise that is estimated from what
    /// was placed there.
    pub reports_cache: bool,
}

impl Default for Capabilities {
    /// Everything, on tokens.
    fn default() -> Self {
        Self {
            handoff: HandoffKind::Concurrent,
            first_token: FirstToken::Prefill,
            positions: Positions::Exact,
            resumes: true,
            retargets: true,
            splits_choices: true,
            role_use: RoleUse::Discount,
            payload: Payload::Tokens,
            reports_load: true,
            reports_cache: true,
        }
    }
}
