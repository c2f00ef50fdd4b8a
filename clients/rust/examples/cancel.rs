//! Three ways to end a generation early; each frees the server at once.   cargo run --example cancel [TARGET]

use std::time::Duration;

use mlxstream::{Error, chat, connect, user};
use tokio::time::{sleep, timeout};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let client = connect(&target)?;
    let question = chat([user("Tell a story that never ends.")]);

    // 1. Drop the stream, as the end of its scope does.
    {
        let mut stream = client.stream(question.clone());
        if let Some(text) = stream.next().await {
            println!("left after {:?}", text?);
        }
    }

    // 2. Drop the future that owns it; a timeout does just that.
    let mut stream = client.stream(question.clone());
    let reading = async move { while stream.next().await.is_some() {} };
    if timeout(Duration::from_millis(500), reading).await.is_err() {
        println!("gave up after half a second");
    }

    // 3. Cancel it from another task: its reader stops without an error.
    let mut stream = client.stream(question);
    let canceller = stream.canceller();
    tokio::spawn(async move {
        sleep(Duration::from_millis(500)).await;
        canceller.cancel();
    });
    while let Some(text) = stream.next().await {
        text?;
    }
    println!("cancelled after {} tokens", stream.usage().generated_tokens);
    Ok(())
}
