package mlxstream

import (
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

// Options say how to generate; see options.proto. What is nil is the model's default. [proto.Uint32] and its kin make
// pointers: &mlxstream.Options{MaxTokens: proto.Uint32(60)}.
//
// [proto.Uint32]: https://pkg.go.dev/google.golang.org/protobuf/proto#Uint32
type Options = v1.GenerateOptions

// Delivery says how to deliver; see delivery.proto.
type Delivery = v1.DeliveryOptions

// Request describes one generation. Only Prompt is required.
type Request struct {
	// Prompt is what to continue: [Text], [Tokens] or [Chat].
	Prompt Prompt
	// Options say how to generate; nil means the model's defaults.
	Options *Options
	// Delivery says how to deliver; nil means the server's defaults.
	Delivery *Delivery
	// Model names the model; "" means the served one.
	Model string
	// RequestID is a name for [Client.Abort]; "" lets the server choose.
	RequestID string
}

// Prompt is what a generation continues.
type Prompt interface {
	fill(stream *v1.GenerateRequest, unary *v1.CompleteRequest)
}

// Text is a prompt of raw text.
func Text(text string) Prompt { return textPrompt{&v1.TextPrompt{Text: text}} }

// Tokens is a prompt of token ids, used exactly as they are.
func Tokens(ids ...uint32) Prompt { return tokenPrompt{&v1.TokenPrompt{Ids: ids}} }

// Chat is a conversation for the model's chat template, oldest turn first.
func Chat(messages ...*v1.ChatMessage) Prompt { return ChatPrompt(&v1.ChatPrompt{Messages: messages}) }

// ChatPrompt is a conversation with settings of its own, such as tools.
func ChatPrompt(prompt *v1.ChatPrompt) Prompt { return chatPrompt{prompt} }

// User is a turn of the user.
func User(text string) *v1.ChatMessage { return Message("user", text) }

// Assistant is a turn of the model.
func Assistant(text string) *v1.ChatMessage { return Message("assistant", text) }

// System is a turn that sets the scene.
func System(text string) *v1.ChatMessage { return Message("system", text) }

// Message is a turn of any role that the template knows.
func Message(role, text string) *v1.ChatMessage {
	part := &v1.ContentPart{Part: &v1.ContentPart_Text{Text: text}}
	return &v1.ChatMessage{Role: role, Content: []*v1.ContentPart{part}}
}

type textPrompt struct{ message *v1.TextPrompt }
type tokenPrompt struct{ message *v1.TokenPrompt }
type chatPrompt struct{ message *v1.ChatPrompt }

func (p textPrompt) fill(stream *v1.GenerateRequest, unary *v1.CompleteRequest) {
	stream.Prompt, unary.Prompt = &v1.GenerateRequest_Text{Text: p.message}, &v1.CompleteRequest_Text{Text: p.message}
}

func (p tokenPrompt) fill(stream *v1.GenerateRequest, unary *v1.CompleteRequest) {
	stream.Prompt = &v1.GenerateRequest_Tokens{Tokens: p.message}
	unary.Prompt = &v1.CompleteRequest_Tokens{Tokens: p.message}
}

func (p chatPrompt) fill(stream *v1.GenerateRequest, unary *v1.CompleteRequest) {
	stream.Prompt, unary.Prompt = &v1.GenerateRequest_Chat{Chat: p.message}, &v1.CompleteRequest_Chat{Chat: p.message}
}

func (r Request) messages() (*v1.GenerateRequest, *v1.CompleteRequest) {
	stream := &v1.GenerateRequest{RequestId: r.RequestID, Model: r.Model, Options: r.Options, Delivery: r.Delivery}
	unary := &v1.CompleteRequest{RequestId: r.RequestID, Model: r.Model, Options: r.Options, Delivery: r.Delivery}
	if r.Prompt != nil { // the server names it as missing
		r.Prompt.fill(stream, unary)
	}
	return stream, unary
}

func (r Request) generate() *v1.GenerateRequest {
	message, _ := r.messages()
	return message
}

func (r Request) complete() *v1.CompleteRequest {
	_, message := r.messages()
	return message
}
