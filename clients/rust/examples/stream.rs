//! Stream an answer, then look at its account.   cargo run --example stream [TARGET]

use std::io::Write;

use mlxstream::v1::{GenerateOptions, GenerateRequest};
use mlxstream::{Error, chat, connect, user};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let client = connect(&target)?;
    let options = GenerateOptions { max_tokens: Some(60), temperature: Some(0.7), seed: Some(1), ..Default::default() };
    let question = chat([user("Name three rivers.")]);
    let mut stream = client.stream(GenerateRequest { options: Some(options), ..question.into() });
    while let Some(text) = stream.next().await {
        print!("{}", text?);
        let _ = std::io::stdout().flush();
    }
    let finished = stream.finished().cloned().unwrap_or_default();
    let (reason, stats) = (finished.finish_reason(), finished.stats.unwrap_or_default());
    println!("\n{reason:?}: {} tokens, {:.1} per second", stats.generated_tokens, stats.decode_tps);
    Ok(())
}
