//! What an operator may choose about placement.

use tasuki_core::CostConfig;

/// Settings of the placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PolicyConfig {
    /// Never place a leg on a worker of another role, even when no other is left. Otherwise
    /// the cost decides, and a role is a small discount.
    pub strict_roles: bool,
    pub cost: CostConfig,
}
