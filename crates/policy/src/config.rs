//! What an operator may choose about placement.

use tasuki_core::CostConfig;

use crate::PolicyKind;

/// Settings of the placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PolicyConfig {
    pub kind: PolicyKind,
    /// Never place a leg on a worker of another role, even when no other is left. Otherwise
    /// the cost decides, and a role is a small discount.
    pub strict_roles: bool,
    pub cost: CostConfig,
    /// Draws the order of equally good workers. Routers side by side need different ones, or
    /// all choose the same workers from the same reports.
    pub seed: u64,
}
