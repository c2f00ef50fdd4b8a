//! The conformance program: requests as lines of JSON on standard input, answers on standard output (clients/conformance).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mlxstream::v1::generate_response::Event;
use mlxstream::v1::{
    AbortStatus, DeadlinePolicy, DeliveryOptions, DrainRequest, Finished, GenerateOptions, GenerateRequest,
    GenerateResponse, GeneratedToken, GetLoadRequest, Started,
};
use mlxstream::{Client, Connect, Error, TextStream, Tls, Usage, chat, message, text, tokens};
use prost_types::Duration as ProtoDuration;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::task::JoinSet;

const LONGEST: usize = 10_000;

type Clients = Arc<Mutex<HashMap<String, Client>>>;

#[tokio::main(worker_threads = 2)]
async fn main() {
    let clients = Clients::default();
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut running = JoinSet::new();
    while let Ok(Some(line)) = lines.next_line().await {
        let request: Value = serde_json::from_str(&line).expect("a line of JSON");
        if request["do"] == "quit" {
            break;
        }
        running.spawn(respond(clients.clone(), request));
        while running.try_join_next().is_some() {}
    }
    running.join_all().await;
    let clients = std::mem::take(&mut *clients.lock().expect("no thread has failed"));
    for client in clients.into_values() {
        client.close().await;
    }
}

async fn respond(clients: Clients, request: Value) {
    let begun = Instant::now();
    let mut answer = match play(&clients, &request).await {
        Ok(answer) => answer,
        Err(error) => {
            json!({"outcome": "failed", "error": error_report(&error), "seconds": begun.elapsed().as_secs_f64()})
        }
    };
    answer["id"] = request["id"].clone();
    print(&answer);
}

fn print(line: &Value) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}").and_then(|()| output.flush()).expect("somebody reads the answers");
}

async fn play(clients: &Clients, request: &Value) -> Result<Value, Error> {
    let client = client_of(clients, request)?;
    match text_of(request, "do") {
        "stream" | "resume" => Ok(play_stream(client, request).await),
        "generate" => play_generate(client, request).await,
        "burst" => Ok(play_burst(client, request).await),
        "watch" => play_watch(client, request).await,
        "abort" => {
            let answer = match request["request_id"].as_str() {
                Some(request_id) => client.abort(request_id).await?,
                None => client.abort_generation(text_of(request, "generation_id")).await?,
            };
            let status = AbortStatus::try_from(answer.status).unwrap_or(AbortStatus::Unspecified).as_str_name();
            Ok(json!({"outcome": "ok", "status": status.replace("ABORT_STATUS_", "")}))
        }
        "health" => Ok(json!({"outcome": "ok", "status": client.health(text_of(request, "service")).await?})),
        "model" => Ok(json!({"outcome": "ok", "model": client.model().await?.name})),
        "load" => {
            let load = client.admin(|mut stub| async move { stub.get_load(GetLoadRequest::default()).await }).await?;
            Ok(json!({"outcome": "ok", "queue_limit": load.queue_limit}))
        }
        "drain" => {
            let drained = client.admin(|mut stub| async move { stub.drain(DrainRequest::default()).await }).await?;
            Ok(json!({
                "outcome": "ok", "finished": drained.finished_generations, "aborted": drained.aborted_generations,
            }))
        }
        "close" => {
            clients.lock().expect("no thread has failed").remove(&request["server"].to_string());
            client.close().await;
            Ok(json!({"outcome": "ok"}))
        }
        other => panic!("unknown request {other}"),
    }
}

fn client_of(clients: &Clients, request: &Value) -> Result<Client, Error> {
    let server = &request["server"];
    let mut known = clients.lock().expect("no thread has failed");
    let client = match known.get(&server.to_string()) {
        Some(client) => client.clone(),
        None => {
            let client = connect(server)?;
            known.insert(server.to_string(), client.clone());
            client
        }
    };
    Ok(match request["timeout_seconds"].as_f64() {
        Some(seconds) => client.with_timeout(Duration::from_secs_f64(seconds)),
        None => client,
    })
}

fn connect(server: &Value) -> Result<Client, Error> {
    let targets: Vec<&str> = match server["targets"].as_array() {
        Some(targets) => targets.iter().filter_map(Value::as_str).collect(),
        None => vec![text_of(server, "target")],
    };
    let mut settings = Connect::to(targets);
    if let Some(tls) = server["tls"].as_object() {
        let read = |name: &str| {
            tls.get(name).and_then(Value::as_str).map(|path| std::fs::read(path).expect("a file of the runner"))
        };
        settings = settings.tls(Tls {
            authorities: read("ca_file"),
            identity: read("certificate_file").zip(read("key_file")),
            server_name: tls.get("server_name").and_then(Value::as_str).map(str::to_owned),
        });
    }
    if let Some(token) = server["token"].as_str() {
        settings = settings.token(token);
    }
    settings.connect()
}

fn request_of(request: &Value) -> GenerateRequest {
    let prompt = &request["prompt"];
    let prompt = if let Some(ids) = prompt["tokens"].as_array() {
        tokens(ids.iter().filter_map(u32_of))
    } else if let Some(messages) = prompt["messages"].as_array() {
        chat(messages.iter().map(|turn| message(text_of(turn, "role"), text_of(turn, "content"))))
    } else {
        let filler = prompt["filler_bytes"].as_u64().unwrap_or(0) as usize;
        text(text_of(prompt, "text").to_owned() + &"x".repeat(filler))
    };
    GenerateRequest {
        request_id: text_of(request, "request_id").to_owned(),
        model: text_of(request, "model").to_owned(),
        options: request.get("options").map(options_of),
        delivery: request.get("delivery").map(delivery_of),
        ..prompt.into()
    }
}

fn options_of(options: &Value) -> GenerateOptions {
    let stops = options["stop_sequences"].as_array().into_iter().flatten();
    GenerateOptions {
        max_tokens: u32_of(&options["max_tokens"]),
        temperature: options["temperature"].as_f64(),
        top_p: options["top_p"].as_f64(),
        top_k: u32_of(&options["top_k"]),
        seed: options["seed"].as_str().and_then(|seed| seed.parse().ok()),
        stop_sequences: stops.filter_map(Value::as_str).map(str::to_owned).collect(),
        logprobs: options["logprobs"].as_bool(),
        top_logprobs: u32_of(&options["top_logprobs"]),
        ..Default::default()
    }
}

fn delivery_of(delivery: &Value) -> DeliveryOptions {
    let is = |name: &str| delivery[name].as_bool().unwrap_or(false);
    DeliveryOptions {
        heartbeat_interval: duration_of(&delivery["heartbeat_seconds"]),
        max_delay: duration_of(&delivery["max_delay_seconds"]),
        max_tokens_per_message: u32_of(&delivery["max_tokens_per_message"]),
        include_text: delivery["include_text"].as_bool(),
        include_token_bytes: is("include_token_bytes"),
        draft_blocks: is("draft_blocks"),
        durable: is("durable"),
        deadline_policy: match delivery["deadline_policy"].as_i64() {
            Some(number) => number as i32,
            None if delivery["deadline_policy"] == "fail" => DeadlinePolicy::Fail as i32,
            None if delivery["deadline_policy"] == "partial_result" => DeadlinePolicy::PartialResult as i32,
            None => DeadlinePolicy::Unspecified as i32,
        },
        ..Default::default()
    }
}

fn duration_of(seconds: &Value) -> Option<ProtoDuration> {
    seconds
        .as_f64()
        .map(|seconds| ProtoDuration { seconds: seconds as i64, nanos: (seconds.fract() * 1e9).round() as i32 })
}

fn u32_of(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| number.try_into().ok())
}

fn text_of<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or("")
}

async fn play_stream(client: Client, request: &Value) -> Value {
    let mut account = Account::new();
    let mut stream = match text_of(request, "do") {
        "resume" => client.resume(
            text_of(request, "generation_id"),
            request["after_sequence"]
                .as_u64()
                .or_else(|| request["after_sequence"].as_str()?.parse().ok())
                .unwrap_or(0),
        ),
        _ => client.stream(request_of(request)),
    };
    let result = if request["end"]["by"] == "owner" {
        read_as_owner(&mut stream, request, &mut account).await
    } else {
        read(&mut stream, request, &mut account).await
    };
    let mut answer = account.report(request);
    answer["outcome"] = match &result {
        Err(_) => "failed",
        Ok(()) if stream.finished().is_some() => "finished",
        Ok(()) => "left",
    }
    .into();
    answer["error"] = result.err().map_or(Value::Null, |error| error_report(&error));
    answer["finish_reason"] = stream.finished().map_or(Value::Null, reason_of);
    answer["matched_stop"] = stream.finished().map_or("", |finished| &finished.matched_stop).into();
    answer["usage"] = usage_report(stream.usage());
    answer["started"] = stream.started().map_or(Value::Null, started_report);
    answer
}

/// Reads as the request says; leaves by dropping or by a canceller.
async fn read(stream: &mut TextStream, request: &Value, account: &mut Account) -> Result<(), Error> {
    let end = &request["end"];
    let canceller = stream.canceller();
    let clock = end["seconds"].as_f64().map(|seconds| {
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
            canceller.cancel();
        })
    });
    let mut is_marked = false;
    let mut has_left = false;
    while let Some(response) = stream.next_event().await {
        let response = response.inspect_err(|_| clock.iter().for_each(|clock| clock.abort()))?;
        account.read(&response);
        is_marked = is_marked || mark(stream, request, account);
        if is_due(end, account) && !has_left {
            has_left = true;
            if end["by"] == "leave" {
                stream.cancel(); // what dropping it does, but its account is still asked for
                break;
            }
            stream.canceller().cancel();
        }
        if let Some(seconds) = request["pause_seconds"].as_f64() {
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        }
    }
    if let Some(clock) = clock {
        clock.abort();
    }
    Ok(())
}

/// Reads inside a future that is dropped when the end is due.
async fn read_as_owner(stream: &mut TextStream, request: &Value, account: &mut Account) -> Result<(), Error> {
    let end = &request["end"];
    let seconds = end["seconds"].as_f64().map_or(Duration::MAX, Duration::from_secs_f64);
    let due = tokio::sync::Notify::new();
    let has_dropped = {
        let reading = async {
            let mut is_marked = false;
            while let Some(response) = stream.next_event().await {
                account.read(&response?);
                is_marked = is_marked || mark(stream, request, account);
                if is_due(end, account) {
                    due.notify_one();
                }
            }
            Ok::<(), Error>(())
        };
        tokio::select! {
            result = reading => return result,
            () = due.notified() => true,
            () = tokio::time::sleep(seconds) => true,
        }
    };
    if has_dropped {
        stream.cancel(); // a reader that owns its stream drops it here
    }
    Ok(())
}

fn is_due(end: &Value, account: &Account) -> bool {
    match text_of(end, "after") {
        "started" => account.messages > 0,
        "chunks" => account.chunks >= end["count"].as_u64().unwrap_or(0),
        _ => false,
    }
}

fn mark(stream: &TextStream, request: &Value, account: &Account) -> bool {
    let is_due = request["mark_after_chunks"].as_u64().is_some_and(|count| account.chunks >= count);
    if is_due {
        let generation_id = stream.started().map(|started| &started.generation_id);
        print(
            &json!({"id": request["id"], "mark": "chunks", "generation_id": generation_id, "sequence": stream.sequence().to_string()}),
        );
    }
    is_due
}

async fn play_generate(client: Client, request: &Value) -> Result<Value, Error> {
    let mut account = Account::new();
    let generation = client.generate(request_of(request)).await?;
    account.take(&generation.text, &generation.tokens);
    let finished = generation.finished.unwrap_or_default();
    let stats = finished.stats.clone().unwrap_or_default();
    let mut answer = account.report(request);
    answer["outcome"] = "finished".into();
    answer["finish_reason"] = reason_of(&finished);
    answer["matched_stop"] = finished.matched_stop.into();
    answer["usage"] = usage_report(Usage {
        prompt_tokens: stats.prompt_tokens,
        cached_tokens: stats.cached_tokens,
        generated_tokens: stats.generated_tokens,
    });
    answer["started"] = generation.started.as_ref().map_or(Value::Null, started_report);
    Ok(answer)
}

async fn play_burst(client: Client, request: &Value) -> Value {
    let burst = Arc::new(Mutex::new(Burst::default()));
    let left = Arc::new(AtomicI64::new(request["count"].as_i64().unwrap_or(0)));
    let begun = Instant::now();
    let mut lanes = JoinSet::new();
    for _ in 0..request["streams"].as_u64().unwrap_or(1) {
        let (burst, left, client, message) = (burst.clone(), left.clone(), client.clone(), request_of(request));
        lanes.spawn(async move {
            while left.fetch_sub(1, Ordering::Relaxed) > 0 {
                let mut account = Account::new();
                let mut stream = client.stream(message.clone());
                let result = loop {
                    match stream.next_event().await {
                        Some(Ok(response)) => account.read(&response),
                        Some(Err(error)) => break Err(error),
                        None => break Ok(()),
                    }
                };
                burst.lock().expect("no lane has failed").add(&stream, account, result);
            }
        });
    }
    lanes.join_all().await;
    burst.lock().expect("no lane has failed").report(begun.elapsed())
}

async fn play_watch(client: Client, request: &Value) -> Result<Value, Error> {
    let mut statuses = Vec::new();
    let wanted = request["count"].as_u64().unwrap_or(1) as usize;
    client
        .watch_health(text_of(request, "service"), |status| {
            statuses.push(status);
            if statuses.len() == 1 {
                print(&json!({"id": request["id"], "mark": "chunks"}));
            }
            statuses.len() < wanted
        })
        .await?;
    Ok(json!({"outcome": "ok", "statuses": statuses}))
}

/// What one stream showed.
struct Account {
    begun: Instant,
    text: String,
    tokens: Vec<u32>,
    indices: Vec<u32>,
    token_bytes: Vec<String>,
    logprobs: Vec<f64>,
    blocks: Vec<Value>,
    messages: u64,
    chunks: u64,
    heartbeats: u64,
    unknown_events: u64,
    first_text_seconds: Option<f64>,
}

impl Account {
    fn new() -> Self {
        Self {
            begun: Instant::now(),
            text: String::new(),
            tokens: Vec::new(),
            indices: Vec::new(),
            token_bytes: Vec::new(),
            logprobs: Vec::new(),
            blocks: Vec::new(),
            messages: 0,
            chunks: 0,
            heartbeats: 0,
            unknown_events: 0,
            first_text_seconds: None,
        }
    }

    fn read(&mut self, response: &GenerateResponse) {
        self.messages += 1;
        match &response.event {
            Some(Event::Chunk(chunk)) => {
                self.chunks += 1;
                self.take(&chunk.text, &chunk.tokens);
            }
            Some(Event::Block(block)) => self.blocks.push(json!({
                "block_index": block.block_index, "revision": block.revision,
                "committed": block.committed, "tokens": block.tokens,
            })),
            Some(Event::Heartbeat(_)) => self.heartbeats += 1,
            Some(Event::Started(_) | Event::Finished(_)) => {}
            None => self.unknown_events += 1,
        }
    }

    fn take(&mut self, text: &str, tokens: &[GeneratedToken]) {
        self.text.push_str(text);
        if !text.is_empty() {
            self.first_text_seconds.get_or_insert(self.begun.elapsed().as_secs_f64());
        }
        for token in tokens {
            self.tokens.push(token.token);
            self.indices.push(token.index);
            self.token_bytes.push(token.text_bytes.iter().map(|byte| format!("{byte:02x}")).collect());
            self.logprobs.extend(token.logprobs.as_ref().and_then(|logprobs| logprobs.logprob));
        }
    }

    fn is_in_order(&self, is_resumed: bool) -> bool {
        let first = if is_resumed { self.indices.first().copied().unwrap_or(0) } else { 0 };
        self.indices.iter().zip(first..).all(|(index, place)| *index == place)
    }

    fn report(&self, request: &Value) -> Value {
        let mut report = Map::new();
        report.insert("text".into(), self.text.chars().take(LONGEST).collect::<String>().into());
        report.insert("text_characters".into(), self.text.chars().count().into());
        report.insert("tokens".into(), self.tokens.iter().copied().take(LONGEST).collect::<Vec<_>>().into());
        if request["delivery"]["include_token_bytes"] == true {
            report.insert("token_bytes".into(), self.token_bytes.clone().into());
        }
        if request["options"]["logprobs"] == true {
            report.insert("logprobs".into(), self.logprobs.clone().into());
        }
        report.insert("in_order".into(), self.is_in_order(request["do"] == "resume").into());
        report.insert("heartbeats".into(), self.heartbeats.into());
        report.insert("unknown_events".into(), self.unknown_events.into());
        report.insert("blocks".into(), self.blocks.clone().into());
        report.insert("seconds".into(), self.begun.elapsed().as_secs_f64().into());
        report.insert("first_text_seconds".into(), json!(self.first_text_seconds));
        report.into()
    }
}

/// What many streams showed together.
#[derive(Default)]
struct Burst {
    finished: u64,
    failed: BTreeMap<String, u64>,
    texts: BTreeSet<String>,
    messages: u64,
    generated_tokens: u64,
    added_ms: Vec<f64>,
}

impl Burst {
    fn add(&mut self, stream: &TextStream, account: Account, result: Result<(), Error>) {
        self.messages += account.messages;
        self.generated_tokens += u64::from(stream.usage().generated_tokens);
        if let Err(error) = result {
            *self.failed.entry(kind_name(&error)).or_default() += 1;
            return;
        }
        self.finished += 1;
        self.texts.insert(account.text);
        if let Some(seconds) = account.first_text_seconds {
            let stats = stream.finished().and_then(|finished| finished.stats.as_ref());
            self.added_ms.push(seconds * 1000.0 - stats.map_or(0.0, |stats| stats.time_to_first_token_ms));
        }
    }

    fn report(&mut self, elapsed: Duration) -> Value {
        self.added_ms.sort_by(f64::total_cmp);
        let last = self.added_ms.len().saturating_sub(1);
        let quantile = |share: f64| {
            self.added_ms.get(((self.added_ms.len() as f64 * share) as usize).min(last)).copied().unwrap_or(0.0)
        };
        json!({
            "outcome": "ok", "finished": self.finished, "failed": self.failed, "texts": self.texts,
            "messages": self.messages, "generated_tokens": self.generated_tokens, "seconds": elapsed.as_secs_f64(),
            "added_ms": {"p50": quantile(0.5), "p99": quantile(0.99)},
        })
    }
}

fn usage_report(usage: Usage) -> Value {
    json!({"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens, "generated_tokens": usage.generated_tokens})
}

fn started_report(started: &Started) -> Value {
    let options = started.options.clone().unwrap_or_default();
    json!({
        "model": started.model, "seed_was_explicit": started.seed_was_explicit,
        "seed": options.seed.unwrap_or(0).to_string(), "temperature": options.temperature, "top_p": options.top_p,
        "top_k": options.top_k, "max_tokens": options.max_tokens, "resumed_tokens": started.resumed_tokens,
    })
}

fn error_report(error: &Error) -> Value {
    let fields: Vec<&str> = error.violations.iter().map(|violation| violation.field.as_str()).collect();
    json!({
        "kind": kind_name(error), "code": code_name(error), "reason": error.reason, "message": error.message,
        "violations": fields, "metadata": error.metadata,
        "retry_after_seconds": error.retry_after.map(|wait| wait.as_secs_f64()),
    })
}

fn kind_name(error: &Error) -> String {
    snake_case(&format!("{:?}", error.kind))
}

fn code_name(error: &Error) -> String {
    snake_case(&format!("{:?}", error.code)).to_uppercase()
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for (place, letter) in name.char_indices() {
        if letter.is_uppercase() && place > 0 {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}

/// A value that this client does not know counts as unspecified.
fn reason_of(finished: &Finished) -> Value {
    finished.finish_reason().as_str_name().trim_start_matches("FINISH_REASON_").to_lowercase().into()
}
