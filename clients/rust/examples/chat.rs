//! A conversation: the client keeps the turns, the model's template makes the prompt.   cargo run --example chat [TARGET]

use mlxstream::v1::{ChatMessage, GenerateOptions, GenerateRequest};
use mlxstream::{Error, chat, connect, message, user};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let client = connect(&target)?;
    let mut turns = vec![message("system", "Answer in one sentence.")];
    for question in ["What is the capital of France?", "And which river runs through it?"] {
        turns.push(user(question));
        let options = GenerateOptions { max_tokens: Some(60), ..Default::default() };
        let answer = client.generate(asked(&turns, options)).await?.text;
        println!("> {question}\n{answer}");
        turns.push(message("assistant", answer));
    }

    let wrong = GenerateOptions { temperature: Some(-1.0), ..Default::default() };
    if let Err(error) = client.generate(asked(&turns, wrong)).await {
        for violation in &error.violations {
            println!("{} {}", violation.field, violation.description);
        }
    }
    Ok(())
}

fn asked(turns: &[ChatMessage], options: GenerateOptions) -> GenerateRequest {
    GenerateRequest { options: Some(options), ..chat(turns.to_vec()).into() }
}
