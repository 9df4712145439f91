//! Whatever the order of faults: each choice's tokens come out once each, in
//! order, to the end, and no worker is left with a leg nobody wants.

mod budget;
mod cases;
mod explore;
mod opaque;
mod sim_worker;
mod world;
