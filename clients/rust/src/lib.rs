//! Client of mlx-stream: stream tokens from an MLX engine over gRPC.
//!
//! ```no_run
//! # async fn example() -> Result<(), mlxstream::Error> {
//! let client = mlxstream::connect("127.0.0.1:50051")?;
//! let mut stream = client.stream(mlxstream::text("Once upon a time"));
//! while let Some(text) = stream.next().await {
//!     print!("{}", text?);
//! }
//! client.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! The schema's own messages are in [`v1`].

#![warn(missing_docs)]

mod client;
mod connection;
mod error;
mod reader;
mod request;
mod stream;

/// The schema's own messages and stubs.
#[allow(missing_docs, clippy::all)]
#[rustfmt::skip]
#[path = "generated/mlxstream.v1.rs"]
pub mod v1;

/// What the README shows compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub use client::{Client, Connect, connect};
pub use connection::{Headers, Tls, Transport};
pub use error::{Error, ErrorKind, Failure};
pub use request::{chat, message, text, tokens, user};
pub use stream::{Canceller, TextStream, Usage};
