//! Stream an answer, then look at its account.   cargo run --example stream [TARGET]

use std::io::Write;

use mlxstream::v1::GenerateOptions;
use mlxstream::{Error, Request, connect, user};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let client = connect(&target)?;
    let options = GenerateOptions { max_tokens: Some(60), temperature: Some(0.7), seed: Some(1), ..Default::default() };
    let mut stream = client.stream(Request::chat([user("Name three rivers.")]).options(options));
    while let Some(text) = stream.next().await {
        print!("{}", text?);
        let _ = std::io::stdout().flush();
    }
    let stats = stream.stats().unwrap_or_default();
    let reason = stream.finish_reason();
    println!("\n{reason:?}: {} tokens, {:.1} per second", stats.generated_tokens, stats.decode_tps);
    Ok(())
}
